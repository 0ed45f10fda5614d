"""The integers that hold an exact column sum: what the definition and the kernels have in common."""

LIMBS = 9
LIMB_BITS = 32
UNIT = -149  # exponent of the lowest bit of the lowest limb
SUMS = LIMBS + 1  # the limbs, and the number of addends that are not finite
