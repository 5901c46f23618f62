"""What `frontier` compares, and how it is shown."""
