"""Seeds of everything random."""

from manifoldkv.errors import ArgumentError

SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take.

    Raises
    ------
    ArgumentError
        If it is not an integer of 64 bits, with or without a sign.
    """
    if not isinstance(seed, int) or not SMALLEST_SEED <= seed <= LARGEST_SEED:
        raise ArgumentError(f"seed {seed} is not an integer from {SMALLEST_SEED} to {LARGEST_SEED}")
