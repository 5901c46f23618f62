"""``python -m manifoldkv`` is the command ``manifoldkv``."""

from manifoldkv.cli import main

if __name__ == "__main__":
    main()
