//! A mixture of experts without any transport: the expected result of every step, bit by bit.

use moontide_ep::{ChannelConfig, CombineReport, Dispatched, Dtype, Tokens};

use crate::processes::Rng;

/// Distribution of tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routes {
    /// Any K experts.
    Any,
    /// All tokens of all ranks to experts of one rank.
    OneRank,
    /// Experts of two ranks, drawn for each token.
    TwoRanks,
    /// Between none and K experts per token.
    Sparse,
}

pub const ROUTES: [Routes; 4] = [Routes::Any, Routes::OneRank, Routes::TwoRanks, Routes::Sparse];

/// A rank's tokens of a step, with owned memory.
#[derive(Clone, Debug)]
pub struct Batch {
    pub count: usize,
    pub rows: Vec<u8>,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
}

impl Batch {
    pub fn tokens(&self) -> Tokens<'_> {
        Tokens { rows: &self.rows, experts: &self.experts, weights: &self.weights }
    }

    pub fn draw(shape: &ChannelConfig, count: usize, routes: Routes, rng: &mut Rng) -> Batch {
        let (mut rows, mut experts, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        let first_rank = rng.below(shape.ranks);
        for _ in 0..count {
            let numbers: Vec<f32> = (0..shape.hidden).map(|_| rng.number()).collect();
            let mut row = vec![0; shape.dispatch_dtype.row_bytes(shape.hidden)];
            shape.dispatch_dtype.write(&numbers, &mut row);
            rows.extend(row);
            let of_rank = |rank: usize| rank * shape.experts_per_rank..(rank + 1) * shape.experts_per_rank;
            let mut candidates: Vec<usize> = match routes {
                Routes::Any | Routes::Sparse => (0..shape.experts()).collect(),
                // The same for all ranks and steps, so that one rank gets everything.
                Routes::OneRank => of_rank(shape.ranks - 1).collect(),
                Routes::TwoRanks if shape.ranks < 2 => of_rank(0).collect(),
                Routes::TwoRanks => {
                    let other = (first_rank + 1 + rng.below(shape.ranks - 1)) % shape.ranks;
                    of_rank(first_rank).chain(of_rank(other)).collect()
                }
            };
            let expert_count = match routes {
                Routes::Sparse => rng.below(shape.top_k + 1),
                _ => shape.top_k.min(candidates.len()),
            };
            for k in 0..shape.top_k {
                let expert = match k < expert_count {
                    true => candidates.swap_remove(rng.below(candidates.len())) as i32,
                    false => -1,
                };
                experts.push(expert);
                weights.push(rng.number());
            }
        }
        Batch { count, rows, experts, weights }
    }

    /// Returns the expected results if the experts of the ranks of `report` took part.
    pub fn expected(&self, shape: &ChannelConfig, report: CombineReport) -> Vec<u8> {
        let (row_bytes, result_bytes) =
            (shape.dispatch_dtype.row_bytes(shape.hidden), shape.combine_dtype.row_bytes(shape.hidden));
        let mut results = vec![0; self.count * result_bytes];
        for (token, result) in results.chunks_exact_mut(result_bytes).enumerate() {
            let mut numbers = vec![0f32; shape.hidden];
            shape.dispatch_dtype.read(&self.rows[token * row_bytes..][..row_bytes], &mut numbers);
            let routes = || {
                let range = token * shape.top_k..(token + 1) * shape.top_k;
                self.experts[range.clone()].iter().zip(&self.weights[range])
            };
            let mut sums = vec![0f32; shape.hidden];
            for rank in report.ranks.iter() {
                let on_rank =
                    |expert: i32| expert >= 0 && expert as usize / shape.experts_per_rank == rank.index();
                let hits: Vec<(u32, f32)> = routes()
                    .filter(|(expert, _)| on_rank(**expert))
                    .map(|(&expert, &weight)| (expert as u32 % shape.experts_per_rank as u32, weight))
                    .collect();
                if hits.is_empty() {
                    continue;
                }
                let mut row = vec![0; result_bytes];
                shape.combine_dtype.write(&rank_result(shape, rank.0, &numbers, &hits), &mut row);
                let mut numbers = vec![0f32; shape.hidden];
                shape.combine_dtype.read(&row, &mut numbers);
                sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
            }
            shape.combine_dtype.write(&sums, result);
        }
        results
    }
}

/// Returns an expert's result for a number. Experts of different ranks differ.
fn expert(rank: u32, expert: u32, number: f32) -> f32 {
    number * (1.0 + expert as f32 * 0.125) + (rank as f32 + 1.0) * 0.25
}

/// Rounds an expert's result as the grouped layout does.
fn rounded(dtype: Dtype, number: f32) -> f32 {
    let mut bytes = [0; 4];
    let bytes = &mut bytes[..dtype.row_bytes(1)];
    dtype.write(&[number], bytes);
    let mut result = [0f32];
    dtype.read(bytes, &mut result);
    result[0]
}

/// Returns the weighted sum of the results of a rank's experts for a token, in the order of the token's experts.
fn rank_result(shape: &ChannelConfig, rank: u32, numbers: &[f32], hits: &[(u32, f32)]) -> Vec<f32> {
    let sum = |&number: &f32| {
        let weighted = |&(local, weight): &(u32, f32)| {
            weight * rounded(shape.combine_dtype, expert(rank, local, number))
        };
        hits.iter().map(weighted).fold(0f32, |sum, number| sum + number)
    };
    numbers.iter().map(sum).collect()
}

/// Runs a rank's experts token by token, without the grouped layout.
pub fn compute_in_place(shape: ChannelConfig, rank: u32) -> impl FnMut(&mut Dispatched<'_>) {
    let mut numbers = vec![0f32; shape.hidden];
    move |dispatched| {
        dispatched.for_each(|token| {
            shape.dispatch_dtype.read(token.row, &mut numbers);
            let hits: Vec<(u32, f32)> = token.hits.iter().map(|hit| (hit.expert, hit.weight)).collect();
            shape.combine_dtype.write(&rank_result(&shape, rank, &numbers, &hits), token.output);
        });
    }
}

/// Runs a rank's experts on the grouped layout: expert by expert, masked, then scattered.
pub fn compute_grouped(shape: ChannelConfig, rank: u32, packed: &[u8], dispatched: &mut Dispatched<'_>) {
    let (row_bytes, result_bytes) =
        (shape.dispatch_dtype.row_bytes(shape.hidden), shape.combine_dtype.row_bytes(shape.hidden));
    // Rows outside the mask stay poisoned.
    let mut grouped = vec![0xff; shape.experts_per_rank * shape.slots() * result_bytes];
    let mut numbers = vec![0f32; shape.hidden];
    for local in 0..shape.experts_per_rank {
        let rows = dispatched.rows_per_expert()[local] as usize;
        assert_eq!(rows, dispatched.group(local).len());
        assert!(dispatched.group(local).is_sorted(), "rows of an expert are in the order of slots");
        for row in 0..rows {
            let at = local * shape.slots() + row;
            let packed = &packed[at * row_bytes..][..row_bytes];
            assert_eq!(
                packed,
                dispatched.row(dispatched.group(local)[row] as usize),
                "packed row equals the sent row"
            );
            shape.dispatch_dtype.read(packed, &mut numbers);
            numbers.iter_mut().for_each(|number| *number = expert(rank, local as u32, *number));
            shape.combine_dtype.write(&numbers, &mut grouped[at * result_bytes..][..result_bytes]);
        }
    }
    dispatched.scatter(&grouped);
}
