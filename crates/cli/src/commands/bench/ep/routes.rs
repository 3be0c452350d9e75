//! [`Routes`]: which tokens go to which experts, drawn from a seed so that every rank knows everyone's.

/// Where tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Routes {
    /// To any K experts.
    Any,
    /// To experts of the last rank, all of them.
    OneRank,
    /// To experts of two ranks, drawn for each token.
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

    /// The experts of a rank's tokens, K each; −1 where there are not as many.
    pub(super) fn draw(self, draw: &Draw) -> Vec<i32> {
        let &Draw { ranks, rank, tokens, top_k, experts, seed } = draw;
        let mut dice = Dice(seed ^ (rank as u64) << 40 ^ (tokens as u64) << 20);
        let of_rank = |rank: usize| rank * experts..(rank + 1) * experts;
        let mut drawn = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            let mut candidates: Vec<usize> = match self {
                Routes::Any => (0..ranks * experts).collect(),
                Routes::OneRank => of_rank(ranks - 1).collect(),
                Routes::TwoRanks => {
                    let one = dice.below(ranks);
                    let other = (one + 1 + dice.below(ranks.saturating_sub(1).max(1))) % ranks;
                    let other = if other == one { 0..0 } else { of_rank(other) };
                    of_rank(one).chain(other).collect()
                }
            };
            for _ in 0..top_k {
                drawn.push(match candidates.len() {
                    0 => -1,
                    left => candidates.swap_remove(dice.below(left)) as i32,
                });
            }
        }
        drawn
    }
}

/// What routes are drawn for.
pub(super) struct Draw {
    pub(super) ranks: usize,
    pub(super) rank: usize,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) experts: usize,
    pub(super) seed: u64,
}

/// Random numbers (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % end as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_go_where_they_say() {
        let draw = |rank| Draw { ranks: 4, rank, tokens: 50, top_k: 6, experts: 8, seed: 7 };
        for routes in [Routes::Any, Routes::OneRank, Routes::TwoRanks] {
            let drawn = routes.draw(&draw(1));
            assert_eq!(drawn, routes.draw(&draw(1)), "the same for everyone who asks");
            assert_ne!(drawn, routes.draw(&draw(2)));
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
        let few = Draw { experts: 2, ..draw(0) };
        assert!(Routes::OneRank.draw(&few).chunks(6).all(|experts| experts[2..] == [-1; 4]));
    }
}
