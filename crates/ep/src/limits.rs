//! Limits of a channel that several files use.

/// Most experts of a token: a bound for loops on the stack, four times as many as models use.
pub const TOP_K_MAX: usize = 32;

/// Most rows of a rank's grouped layout, filled or not: their list takes 4 B each, from the start.
pub const GROUPED_ROWS_MAX: usize = 1 << 28;
