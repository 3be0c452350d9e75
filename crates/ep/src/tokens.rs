//! [`Tokens`]: what a rank sends in one step, and why it may not.
//!
//! Everything is checked before anything is written: a step that is refused has touched nobody's memory.

use crate::layout::{Layout, Shape};

/// A rank's tokens of one step and where they go. None at all is an ordinary step.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// The tokens, row after row, as the channel's `send` dtype has them.
    pub rows: &'a [u8],
    /// For each token its K experts by their number among all ranks; −1 for none.
    pub experts: &'a [i32],
    /// For each of these its weight.
    pub weights: &'a [f32],
}

impl Tokens<'_> {
    /// A step without tokens.
    pub const NONE: Tokens<'static> = Tokens { rows: &[], experts: &[], weights: &[] };
}

/// Why tokens were not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// More than the channel was made for.
    #[error(
        "{tokens} tokens in a channel for {max}; give the rest in another step, or make a larger channel"
    )]
    TooMany {
        /// How many.
        tokens: usize,
        /// How many at most.
        max: usize,
    },
    /// Rows, experts and weights do not fit each other.
    #[error(
        "{experts} experts, {weights} weights and {row_bytes} bytes of rows are not the same number of tokens"
    )]
    Lengths {
        /// Numbers of experts.
        experts: usize,
        /// Numbers of weights.
        weights: usize,
        /// Bytes of rows.
        row_bytes: usize,
    },
    /// An expert that no rank has.
    #[error("token {token} goes to expert {expert}; there are {experts}")]
    NoSuchExpert {
        /// Which token.
        token: usize,
        /// Which expert.
        expert: i32,
        /// How many there are.
        experts: usize,
    },
    /// An expert is named twice for one token.
    #[error("token {token} goes to expert {expert} twice")]
    ExpertTwice {
        /// Which token.
        token: usize,
        /// Which expert.
        expert: i32,
    },
    /// The step before has not been finished: its guard was dropped. See [`Channel::abandon`](crate::Channel::abandon).
    #[error("the step before was not finished; abandon it first")]
    Unfinished,
    /// The others have gone on without this rank. See [`Channel::rejoin`](crate::Channel::rejoin).
    #[error("the others have gone on without this rank; it may rejoin")]
    Excluded,
    /// A barrier can be shared by two steps only if there are two buffers.
    #[error("a return and the next dispatch share a barrier only with two buffers")]
    OneBuffer,
}

/// How many tokens there are, if they may be sent.
pub(crate) fn check(tokens: &Tokens<'_>, shape: &Shape, layout: &Layout) -> Result<usize, SendError> {
    let &Tokens { rows, experts, weights } = tokens;
    let count = experts.len() / shape.top_k;
    if count > shape.tokens_max {
        return Err(SendError::TooMany { tokens: count, max: shape.tokens_max });
    }
    let fits = experts.len() == count * shape.top_k
        && weights.len() == experts.len()
        && rows.len() == count * layout.row_bytes;
    if !fits {
        let (experts, weights, row_bytes) = (experts.len(), weights.len(), rows.len());
        return Err(SendError::Lengths { experts, weights, row_bytes });
    }
    let all = shape.experts();
    for (token, experts) in experts.chunks_exact(shape.top_k).enumerate() {
        for (at, &expert) in experts.iter().enumerate().filter(|(_, expert)| **expert != -1) {
            if usize::try_from(expert).is_ok_and(|expert| expert < all) {
                if experts[..at].contains(&expert) {
                    return Err(SendError::ExpertTwice { token, expert });
                }
            } else {
                return Err(SendError::NoSuchExpert { token, expert, experts: all });
            }
        }
    }
    Ok(count)
}
