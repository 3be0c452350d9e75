//! [`Recording`]: a fixed schedule of steps, recorded once and replayed any number of times.
//!
//! The recording allocates everything that a replay needs: buffers with fixed addresses, one set per layer, and the
//! functions to run. A replay allocates nothing and makes no system call, unless a rank is so late that others sleep.
//! Phases are read from shared memory, so a replay does not depend on the time of its recording, and the number of
//! tokens of a layer is read in each replay.

use std::time::Duration;

use crate::channel::Channel;
use crate::layout::ChannelConfig;
use crate::step::{CombineReport, Dispatched, StepError};
use crate::tokens::Tokens;

/// Tokens of a layer: filled before each replay, or by the layer's own `prepare`.
#[derive(Debug)]
pub struct LayerInput {
    /// Number of tokens; the rest of the buffers is ignored.
    pub tokens: usize,
    /// `tokens_max` rows in the dispatch dtype.
    pub rows: Vec<u8>,
    /// `tokens_max` × K experts.
    pub experts: Vec<i32>,
    /// `tokens_max` × K weights.
    pub weights: Vec<f32>,
}

/// Fills the input of a layer from the results of the previous layer, which are empty for the first.
type Prepare = Box<dyn FnMut(&mut LayerInput, &[u8]) + Send>;
type Compute = Box<dyn FnMut(&mut Dispatched<'_>) + Send>;

struct RecordedLayer {
    channel: usize,
    input: LayerInput,
    results: Vec<u8>,
    report: Option<CombineReport>,
    prepare: Prepare,
    compute: Compute,
}

/// Schedule of steps on fixed buffers.
pub struct Recording {
    channels: Vec<Channel>,
    layers: Vec<RecordedLayer>,
}

impl Recording {
    /// Creates an empty schedule on these channels.
    pub fn new(channels: Vec<Channel>) -> Recording {
        Recording { channels, layers: Vec::new() }
    }

    /// Records a step on one of the channels: `prepare` fills its input from the results of the previous step,
    /// `compute` runs this rank's experts. Returns the number of the layer.
    ///
    /// # Panics
    /// If the channel does not exist.
    pub fn layer(
        &mut self,
        channel: usize,
        prepare: impl FnMut(&mut LayerInput, &[u8]) + Send + 'static,
        compute: impl FnMut(&mut Dispatched<'_>) + Send + 'static,
    ) -> usize {
        let ChannelConfig { tokens_max, hidden, top_k, dispatch_dtype, combine_dtype, .. } =
            *self.channels[channel].shape();
        let input = LayerInput {
            tokens: 0,
            rows: vec![0; tokens_max * dispatch_dtype.row_bytes(hidden)],
            experts: vec![-1; tokens_max * top_k],
            weights: vec![0.0; tokens_max * top_k],
        };
        let results = vec![0; tokens_max * combine_dtype.row_bytes(hidden)];
        let (prepare, compute) = (Box::new(prepare), Box::new(compute));
        self.layers.push(RecordedLayer { channel, input, results, report: None, prepare, compute });
        self.layers.len() - 1
    }

    /// Runs all steps in order. After an error the step of that channel is unfinished: see [`Channel::abort_step`].
    pub fn replay(&mut self, timeout: Duration) -> Result<(), StepError> {
        let Recording { channels, layers } = self;
        // After a failed replay, no results of an earlier one may be returned.
        layers.iter_mut().for_each(|layer| layer.report = None);
        let mut done = 0;
        while done < layers.len() {
            let (before, rest) = layers.split_at_mut(done);
            let layer = &mut rest[0];
            let last = before.last().map_or(&[][..], |layer| {
                let shape = channels[layer.channel].shape();
                &layer.results[..layer.input.tokens * shape.combine_dtype.row_bytes(shape.hidden)]
            });
            (layer.prepare)(&mut layer.input, last);
            let channel = &mut channels[layer.channel];
            let ChannelConfig { hidden, top_k, dispatch_dtype, combine_dtype, .. } = *channel.shape();
            let count = layer.input.tokens;
            let tokens = Tokens {
                rows: &layer.input.rows[..count * dispatch_dtype.row_bytes(hidden)],
                experts: &layer.input.experts[..count * top_k],
                weights: &layer.input.weights[..count * top_k],
            };
            let results = &mut layer.results[..count * combine_dtype.row_bytes(hidden)];
            layer.report = Some(channel.moe_forward(tokens, results, timeout, &mut layer.compute)?);
            done += 1;
        }
        Ok(())
    }

    /// Returns the input of a layer.
    pub fn input(&mut self, layer: usize) -> &mut LayerInput {
        &mut self.layers[layer].input
    }

    /// Returns the results of a layer in the last replay, and its report; `None` before the first, and if the last
    /// replay failed before this layer.
    pub fn results(&self, layer: usize) -> Option<(&[u8], CombineReport)> {
        let layer = &self.layers[layer];
        let shape = self.channels[layer.channel].shape();
        let bytes = layer.input.tokens * shape.combine_dtype.row_bytes(shape.hidden);
        Some((&layer.results[..bytes], layer.report?))
    }

    /// Returns the channels, for calls between replays: abort, exclude, rejoin.
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
