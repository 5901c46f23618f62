"""Transform coding of keys and values: transforms, predictions, quantisers and bit allocation."""
