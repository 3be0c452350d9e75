//! [`Tokens`]: input of a rank for one step, and its validation.
//!
//! Everything is checked before anything is written: a rejected step has changed no memory of any rank.

use crate::layout::{ChannelConfig, Layout};

/// A rank's tokens of one step and their experts. Having no tokens is valid.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Tokens, row after row, in the dispatch dtype of the channel.
    pub rows: &'a [u8],
    /// Per token its K experts, numbered over all ranks; −1 for none.
    pub experts: &'a [i32],
    /// Weight of each entry of `experts`.
    pub weights: &'a [f32],
}

impl Tokens<'_> {
    /// A step without tokens.
    pub const NONE: Tokens<'static> = Tokens { rows: &[], experts: &[], weights: &[] };
}

/// Reason why tokens were not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// More tokens than the channel allows.
    #[error(
        "{tokens} tokens in a channel for {max}; send the rest in another step, or open a larger channel"
    )]
    TooMany {
        /// Number of tokens.
        tokens: usize,
        /// Limit of the channel.
        max: usize,
    },
    /// The lengths of rows, experts and weights are inconsistent.
    #[error(
        "{experts} experts, {weights} weights and {row_bytes} bytes of rows are not the same number of tokens"
    )]
    Lengths {
        /// Length of `experts`.
        experts: usize,
        /// Length of `weights`.
        weights: usize,
        /// Length of `rows` in bytes.
        row_bytes: usize,
    },
    /// The expert does not exist.
    #[error("token {token} goes to expert {expert}; there are {experts}")]
    NoSuchExpert {
        /// Index of the token.
        token: usize,
        /// Number of the expert.
        expert: i32,
        /// Number of experts of all ranks.
        experts: usize,
    },
    /// A token names an expert twice.
    #[error("token {token} goes to expert {expert} twice")]
    ExpertTwice {
        /// Index of the token.
        token: usize,
        /// Number of the expert.
        expert: i32,
    },
    /// The previous step is not finished: its guard was dropped. See
    /// [`Channel::abort_step`](crate::Channel::abort_step).
    #[error("previous step is not finished; abort it first")]
    StepInProgress,
    /// The other ranks have excluded this rank. See [`Channel::rejoin`](crate::Channel::rejoin).
    #[error("the other ranks have excluded this rank; rejoin before the next step")]
    Excluded,
    /// Combine and next dispatch can share a phase only with two buffers.
    #[error("combine and next dispatch can share a phase only with double buffering")]
    SingleBuffered,
}

/// Returns the number of tokens, if they are valid.
pub(crate) fn check(
    tokens: &Tokens<'_>,
    shape: &ChannelConfig,
    layout: &Layout,
) -> Result<usize, DispatchError> {
    let &Tokens { rows, experts, weights } = tokens;
    let count = experts.len() / shape.top_k;
    if count > shape.tokens_max {
        return Err(DispatchError::TooMany { tokens: count, max: shape.tokens_max });
    }
    let fits = experts.len() == count * shape.top_k
        && weights.len() == experts.len()
        && rows.len() == count * layout.row_bytes;
    if !fits {
        let (experts, weights, row_bytes) = (experts.len(), weights.len(), rows.len());
        return Err(DispatchError::Lengths { experts, weights, row_bytes });
    }
    let all = shape.experts();
    for (token, experts) in experts.chunks_exact(shape.top_k).enumerate() {
        for (at, &expert) in experts.iter().enumerate().filter(|(_, expert)| **expert != -1) {
            if usize::try_from(expert).is_ok_and(|expert| expert < all) {
                if experts[..at].contains(&expert) {
                    return Err(DispatchError::ExpertTwice { token, expert });
                }
            } else {
                return Err(DispatchError::NoSuchExpert { token, expert, experts: all });
            }
        }
    }
    Ok(count)
}
