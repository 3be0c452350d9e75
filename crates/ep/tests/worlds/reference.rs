//! A mixture of experts without any transport: what every step must come to, bit by bit.

use moontide_ep::{Dtype, Received, Shape, Summed, Tokens};

use crate::troupe::Dice;

/// Where tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routes {
    /// Any K experts.
    Any,
    /// All tokens of all ranks to experts of one rank.
    OneRank,
    /// Experts of two ranks, drawn for each token.
    TwoRanks,
    /// Some of the K, or none at all.
    Sparse,
}

pub const ROUTES: [Routes; 4] = [Routes::Any, Routes::OneRank, Routes::TwoRanks, Routes::Sparse];

/// A rank's tokens of a step, with everything owned.
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

    pub fn draw(shape: &Shape, count: usize, routes: Routes, dice: &mut Dice) -> Batch {
        let (mut rows, mut experts, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        let one = dice.below(shape.ranks);
        for _ in 0..count {
            let numbers: Vec<f32> = (0..shape.hidden).map(|_| dice.number()).collect();
            let mut row = vec![0; shape.send.row_bytes(shape.hidden)];
            shape.send.write(&numbers, &mut row);
            rows.extend(row);
            let of_rank = |rank: usize| rank * shape.experts_per_rank..(rank + 1) * shape.experts_per_rank;
            let mut candidates: Vec<usize> = match routes {
                Routes::Any | Routes::Sparse => (0..shape.experts()).collect(),
                // The same for all ranks and steps, so that one of them gets everything.
                Routes::OneRank => of_rank(shape.ranks - 1).collect(),
                Routes::TwoRanks if shape.ranks < 2 => of_rank(0).collect(),
                Routes::TwoRanks => {
                    let other = (one + 1 + dice.below(shape.ranks - 1)) % shape.ranks;
                    of_rank(one).chain(of_rank(other)).collect()
                }
            };
            let wanted = match routes {
                Routes::Sparse => dice.below(shape.top_k + 1),
                _ => shape.top_k.min(candidates.len()),
            };
            for k in 0..shape.top_k {
                let expert = match k < wanted {
                    true => candidates.swap_remove(dice.below(candidates.len())) as i32,
                    false => -1,
                };
                experts.push(expert);
                weights.push(dice.number());
            }
        }
        Batch { count, rows, experts, weights }
    }

    /// What the step must come to if the experts of these ranks took part.
    pub fn expected(&self, shape: &Shape, summed: Summed) -> Vec<u8> {
        let (row_bytes, back_bytes) =
            (shape.send.row_bytes(shape.hidden), shape.back.row_bytes(shape.hidden));
        let mut results = vec![0; self.count * back_bytes];
        for (token, result) in results.chunks_exact_mut(back_bytes).enumerate() {
            let mut numbers = vec![0f32; shape.hidden];
            shape.send.read(&self.rows[token * row_bytes..][..row_bytes], &mut numbers);
            let routes = || {
                let range = token * shape.top_k..(token + 1) * shape.top_k;
                self.experts[range.clone()].iter().zip(&self.weights[range])
            };
            let mut sums = vec![0f32; shape.hidden];
            for rank in summed.ranks.iter() {
                let here =
                    |expert: i32| expert >= 0 && expert as usize / shape.experts_per_rank == rank.index();
                let hits: Vec<(u32, f32)> = routes()
                    .filter(|(expert, _)| here(**expert))
                    .map(|(&expert, &weight)| (expert as u32 % shape.experts_per_rank as u32, weight))
                    .collect();
                if hits.is_empty() {
                    continue;
                }
                let mut back = vec![0; back_bytes];
                shape.back.write(&work(shape, rank.0, &numbers, &hits), &mut back);
                let mut numbers = vec![0f32; shape.hidden];
                shape.back.read(&back, &mut numbers);
                sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
            }
            shape.back.write(&sums, result);
        }
        results
    }
}

/// What an expert makes of a number. Experts of different ranks differ.
fn expert(rank: u32, expert: u32, number: f32) -> f32 {
    number * (1.0 + expert as f32 * 0.125) + (rank as f32 + 1.0) * 0.25
}

/// An expert's result as a grouped layout would hold it: rounded.
fn rounded(dtype: Dtype, number: f32) -> f32 {
    let mut bytes = [0; 4];
    let bytes = &mut bytes[..dtype.row_bytes(1)];
    dtype.write(&[number], bytes);
    let mut back = [0f32];
    dtype.read(bytes, &mut back);
    back[0]
}

/// The weighted sum of what a rank's experts make of a token, in the order of the token's experts.
fn work(shape: &Shape, rank: u32, numbers: &[f32], hits: &[(u32, f32)]) -> Vec<f32> {
    let sum = |&number: &f32| {
        let one = |&(local, weight): &(u32, f32)| weight * rounded(shape.back, expert(rank, local, number));
        hits.iter().map(one).fold(0f32, |sum, number| sum + number)
    };
    numbers.iter().map(sum).collect()
}

/// A rank's experts, token by token, in place.
pub fn compute_in_place(shape: Shape, rank: u32) -> impl FnMut(&mut Received<'_>) {
    let mut numbers = vec![0f32; shape.hidden];
    move |received| {
        received.for_each(|token| {
            shape.send.read(token.row, &mut numbers);
            let hits: Vec<(u32, f32)> = token.hits.iter().map(|hit| (hit.expert, hit.weight)).collect();
            shape.back.write(&work(&shape, rank, &numbers, &hits), token.back);
        });
    }
}

/// A rank's experts on the grouped layout: expert by expert, masked, then scattered.
pub fn compute_grouped(shape: Shape, rank: u32, packed: &[u8], received: &mut Received<'_>) {
    let (row_bytes, back_bytes) = (shape.send.row_bytes(shape.hidden), shape.back.row_bytes(shape.hidden));
    // What the mask leaves out is poison.
    let mut grouped = vec![0xff; shape.experts_per_rank * shape.slots() * back_bytes];
    let mut numbers = vec![0f32; shape.hidden];
    for local in 0..shape.experts_per_rank {
        let rows = received.rows_per_expert()[local] as usize;
        assert_eq!(rows, received.group(local).len());
        assert!(received.group(local).is_sorted(), "rows of an expert are in the order of slots");
        for row in 0..rows {
            let at = local * shape.slots() + row;
            let packed = &packed[at * row_bytes..][..row_bytes];
            assert_eq!(packed, received.row(received.group(local)[row] as usize), "packed is what was sent");
            shape.send.read(packed, &mut numbers);
            numbers.iter_mut().for_each(|number| *number = expert(rank, local as u32, *number));
            shape.back.write(&numbers, &mut grouped[at * back_bytes..][..back_bytes]);
        }
    }
    received.scatter(&grouped);
}
