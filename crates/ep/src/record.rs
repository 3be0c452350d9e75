//! [`Recording`]: a fixed schedule of steps, recorded once and replayed as often as wanted.
//!
//! What a replay needs was made when it was recorded: buffers with fixed addresses, one set per layer, and what is to be
//! done with them. A replay allocates nothing and, unless a rank is late enough for others to sleep, calls the system for
//! nothing. Phases come from shared memory, so a replay is not bound to the moment of its recording, and how many tokens
//! a layer has is read anew each time.

use std::time::Duration;

use crate::channel::Channel;
use crate::layout::Shape;
use crate::step::{Received, StepError, Summed};
use crate::tokens::Tokens;

/// What a layer sends: filled before each replay, or by the layer's own `prepare`.
#[derive(Debug)]
pub struct Input {
    /// How many tokens; the rest of the buffers is not looked at.
    pub tokens: usize,
    /// `tokens_max` rows in the `send` dtype.
    pub rows: Vec<u8>,
    /// `tokens_max` × K experts.
    pub experts: Vec<i32>,
    /// `tokens_max` × K weights.
    pub weights: Vec<f32>,
}

/// Fills a layer's input; gets the results of the layer before, which are empty for the first.
type Prepare = Box<dyn FnMut(&mut Input, &[u8]) + Send>;
type Compute = Box<dyn FnMut(&mut Received<'_>) + Send>;

struct Layer {
    channel: usize,
    input: Input,
    results: Vec<u8>,
    summed: Option<Summed>,
    prepare: Prepare,
    compute: Compute,
}

/// Steps in a fixed order on fixed buffers.
pub struct Recording {
    channels: Vec<Channel>,
    layers: Vec<Layer>,
}

impl Recording {
    /// An empty schedule on these channels.
    pub fn new(channels: Vec<Channel>) -> Recording {
        Recording { channels, layers: Vec::new() }
    }

    /// Records a step on one of the channels: `prepare` fills its input from the results of the step before, `compute`
    /// is what this rank's experts do. Returns its number.
    ///
    /// # Panics
    /// If there is no such channel.
    pub fn layer(
        &mut self,
        channel: usize,
        prepare: impl FnMut(&mut Input, &[u8]) + Send + 'static,
        compute: impl FnMut(&mut Received<'_>) + Send + 'static,
    ) -> usize {
        let Shape { tokens_max, hidden, top_k, send, back, .. } = *self.channels[channel].shape();
        let input = Input {
            tokens: 0,
            rows: vec![0; tokens_max * send.row_bytes(hidden)],
            experts: vec![-1; tokens_max * top_k],
            weights: vec![0.0; tokens_max * top_k],
        };
        let results = vec![0; tokens_max * back.row_bytes(hidden)];
        let (prepare, compute) = (Box::new(prepare), Box::new(compute));
        self.layers.push(Layer { channel, input, results, summed: None, prepare, compute });
        self.layers.len() - 1
    }

    /// Runs all steps in order. After an error the channel of that step is unfinished: see [`Channel::abandon`].
    pub fn replay(&mut self, timeout: Duration) -> Result<(), StepError> {
        let Recording { channels, layers } = self;
        // Whoever fails on the way leaves no results of an earlier replay for new ones.
        layers.iter_mut().for_each(|layer| layer.summed = None);
        let mut done = 0;
        while done < layers.len() {
            let (before, rest) = layers.split_at_mut(done);
            let layer = &mut rest[0];
            let last = before.last().map_or(&[][..], |layer| {
                let shape = channels[layer.channel].shape();
                &layer.results[..layer.input.tokens * shape.back.row_bytes(shape.hidden)]
            });
            (layer.prepare)(&mut layer.input, last);
            let channel = &mut channels[layer.channel];
            let Shape { hidden, top_k, send, back, .. } = *channel.shape();
            let count = layer.input.tokens;
            let tokens = Tokens {
                rows: &layer.input.rows[..count * send.row_bytes(hidden)],
                experts: &layer.input.experts[..count * top_k],
                weights: &layer.input.weights[..count * top_k],
            };
            let results = &mut layer.results[..count * back.row_bytes(hidden)];
            layer.summed = Some(channel.moe_forward(tokens, results, timeout, &mut layer.compute)?);
            done += 1;
        }
        Ok(())
    }

    /// The input of a layer.
    pub fn input(&mut self, layer: usize) -> &mut Input {
        &mut self.layers[layer].input
    }

    /// The results of a layer's last replay, and who took part; `None` before the first, and if it did not get there.
    pub fn results(&self, layer: usize) -> Option<(&[u8], Summed)> {
        let layer = &self.layers[layer];
        let shape = self.channels[layer.channel].shape();
        let bytes = layer.input.tokens * shape.back.row_bytes(shape.hidden);
        Some((&layer.results[..bytes], layer.summed?))
    }

    /// The channels, for what is between replays: abandoning, leaving behind, rejoining.
    pub fn channels(&mut self) -> &mut [Channel] {
        &mut self.channels
    }
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording")
            .field("channels", &self.channels)
            .field("layers", &self.layers.len())
            .finish()
    }
}
