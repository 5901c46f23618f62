"""Range of random seeds."""

from manifoldkv.core.errors import ArgumentError

SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1


def check_seed(seed: int) -> None:
    """Raise `ArgumentError` unless `seed` is an integer of 64 bits, as torch's generators take."""
    if not isinstance(seed, int) or not SMALLEST_SEED <= seed <= LARGEST_SEED:
        raise ArgumentError(f"seed {seed} is not an integer from {SMALLEST_SEED} to {LARGEST_SEED}")
