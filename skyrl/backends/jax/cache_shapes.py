"""The few shapes that the cache of running samples may have, so that few programs are compiled.

A cache has rows (samples decoded at once) and a window (tokens per row). Both come from short lists; the byte budget
decides which rows and windows go together: long windows leave room for fewer rows.
"""

from dataclasses import dataclass

ROWS = (1, 4, 8, 16, 32)
SMALLEST_WINDOW = 256
WINDOW_STEP = 512
"""Windows above the smallest are multiples of this, which is also the largest prefill chunk."""


@dataclass(frozen=True)
class CacheShapes:
    """Which (rows, window) there are, ascending, and which fit into `budget_bytes`."""

    rows: tuple[int, ...]
    windows: tuple[int, ...]
    token_bytes: int
    """Keys and values of one token in all layers."""
    budget_bytes: int
    """For all rows and the prompt that is being read; a cache that changes its shape takes up to half as much again."""

    @classmethod
    def of(
        cls, *, max_tokens: int, max_rows: int, token_bytes: int, budget_bytes: int, deterministic: bool = False
    ) -> "CacheShapes":
        """Shapes for samples of at most `max_tokens` tokens, `max_rows` (0: 32) at once.

        `deterministic` leaves one shape, so that every sample runs in the same programs whatever else runs.
        """
        most = max_rows or ROWS[-1]
        rows = (*(count for count in ROWS if count < most), most)
        windows = [SMALLEST_WINDOW]
        while windows[-1] < max_tokens:
            longest = -(-max_tokens // WINDOW_STEP) * WINDOW_STEP
            windows.append(min(2 * windows[-1], longest))
        shapes = cls(rows, tuple(windows), token_bytes, budget_bytes)
        if not deterministic:
            return shapes
        window = max((window for window in windows if shapes.fits(1, window)), default=windows[0])
        fitting = [count for count in rows if shapes.fits(count, window)]
        return cls((max(fitting, default=1),), (window,), token_bytes, budget_bytes)

    def row_count(self, rows: int) -> int:
        """The smallest row count that holds `rows`, at most the largest there is."""
        return next((count for count in self.rows if count >= rows), self.rows[-1])

    def window(self, tokens: int) -> int:
        """The smallest window that holds `tokens`."""
        return next(window for window in self.windows if window >= tokens)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether that many samples of up to `tokens` tokens may run at once."""
        if rows > self.rows[-1] or tokens > self.windows[-1]:
            return False
        return (self.row_count(rows) + 1) * self.window(tokens) * self.token_bytes <= self.budget_bytes

    @property
    def longest(self) -> int:
        """Tokens (prompt and continuation) of the longest sample that fits alone; 0 if none does."""
        return max((window for window in self.windows if self.fits(1, window)), default=0)
