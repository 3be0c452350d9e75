//! [`Routes`]: assignment of tokens to experts, drawn from a seed so that every rank can compute the routes of all
//! ranks.

use moontide_rt::SplitMix64;

/// Distribution of the experts of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Routes {
    /// Any K experts
    Any,
    /// Experts of the last rank for all tokens
    OneRank,
    /// Experts of two ranks, drawn for each token
    TwoRanks,
}

impl Routes {
    pub(super) fn name(self) -> &'static str {
        match self {
            Routes::Any => "any",
            Routes::OneRank => "one-rank",
            Routes::TwoRanks => "two-ranks",
        }
    }

    /// Draws the experts of a rank's tokens, K per token; −1 for missing ones.
    pub(super) fn draw(self, params: &RouteParams) -> Vec<i32> {
        let &RouteParams { ranks, rank, tokens, top_k, experts, seed } = params;
        let mut rng = SplitMix64::new(seed ^ (rank as u64) << 40 ^ (tokens as u64) << 20);
        let of_rank = |rank: usize| rank * experts..(rank + 1) * experts;
        let mut drawn = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            let mut candidates: Vec<usize> = match self {
                Routes::Any => (0..ranks * experts).collect(),
                Routes::OneRank => of_rank(ranks - 1).collect(),
                Routes::TwoRanks => {
                    let one = rng.below(ranks as u64) as usize;
                    let other = (one + 1 + rng.below(ranks.saturating_sub(1).max(1) as u64) as usize) % ranks;
                    let other = if other == one { 0..0 } else { of_rank(other) };
                    of_rank(one).chain(other).collect()
                }
            };
            for _ in 0..top_k {
                drawn.push(match candidates.len() {
                    0 => -1,
                    left => candidates.swap_remove(rng.below(left as u64) as usize) as i32,
                });
            }
        }
        drawn
    }
}

/// Parameters of the routes of a rank.
pub(super) struct RouteParams {
    pub(super) ranks: usize,
    pub(super) rank: usize,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) experts: usize,
    pub(super) seed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_use_allowed_ranks_and_distinct_experts() {
        let params = |rank| RouteParams { ranks: 4, rank, tokens: 50, top_k: 6, experts: 8, seed: 7 };
        for routes in [Routes::Any, Routes::OneRank, Routes::TwoRanks] {
            let drawn = routes.draw(&params(1));
            assert_eq!(drawn, routes.draw(&params(1)), "equal parameters give equal routes");
            assert_ne!(drawn, routes.draw(&params(2)));
            for experts in drawn.chunks(6) {
                let mut ranks: Vec<i32> = experts.iter().map(|expert| expert / 8).collect();
                ranks.sort_unstable();
                ranks.dedup();
                match routes {
                    Routes::Any => assert!(ranks.iter().all(|rank| (0..4).contains(rank))),
                    Routes::OneRank => assert_eq!(ranks, [3]),
                    Routes::TwoRanks => assert!(ranks.len() <= 2),
                }
                let mut distinct = experts.to_vec();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!(distinct.len(), 6, "no expert twice");
            }
        }
        let few = RouteParams { experts: 2, ..params(0) };
        assert!(Routes::OneRank.draw(&few).chunks(6).all(|experts| experts[2..] == [-1; 4]));
    }
}
