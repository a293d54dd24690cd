"""Hypothesis strategies for losses."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

finite = arrays.arrays(
    np.float32,
    (1, 3),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, 1e9, -1e9, 3.4e38, -3.4e38, 1e-45]).map(np.float32).map(float),
        st.floats(-30, 30, width=32),
    ),
)
"""One row of three tokens: any finite numbers, the largest and smallest among them."""
