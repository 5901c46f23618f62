"""manifoldkv: low-rank bases for the key-value cache of language models.

Names are imported when they are first used: ``import manifoldkv`` itself takes no time.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
