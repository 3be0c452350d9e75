//! [`Channel`]: the endpoint of one rank for dispatch and combine.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moontide_ep::{ChannelConfig, Tokens};
use moontide_symmetric::{Rank, RankSet, WaitError};
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::shape::{OutputArray, RowKind, Settings, address_range, experts, overlap, weights};
use super::step::{Dispatching, StepError};
use super::world::{World, rank_set, ranks_tuple};
use crate::arguments::seconds;
use crate::array::Source;
use crate::errors;
use crate::process::{ProcessLocal, unusable_error};

/// A channel and its current step, shared by the Python objects that refer to them.
#[derive(Debug)]
pub(super) struct Shared {
    inner: Mutex<Inner>,
    /// Number of exported buffers of rows that were not released. Grows only under the lock of `inner`.
    pub(super) borrowed: AtomicUsize,
    pub(super) shape: ChannelConfig,
    pub(super) dispatch_rows: RowKind,
    pub(super) combine_rows: RowKind,
    pub(super) auto_exclude: bool,
    rank: u32,
    /// Address ranges of the ranks' memory; results must not be written there.
    regions: Vec<Range<usize>>,
}

#[derive(Debug)]
struct Inner {
    /// `None`: closed.
    channel: Option<moontide_ep::Channel>,
    step: Step,
}

/// The current or last step.
#[derive(Default)]
pub(super) struct Step {
    pub(super) number: u64,
    /// Tokens of the step; those for this rank's own experts are read without a copy.
    pub(super) tokens: Option<Source>,
    pub(super) token_count: usize,
    /// Whether `scatter` was called.
    pub(super) scattered: bool,
}

impl Step {
    /// Returns the bytes of the tokens.
    pub(super) fn rows(&self) -> &[u8] {
        self.tokens.as_ref().map_or(&[], Source::bytes)
    }
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Shared {
    /// Runs a call with the channel. Called with the GIL released.
    pub(super) fn call<R>(
        &self,
        call: impl FnOnce(&mut moontide_ep::Channel, &mut Step) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        let Inner { channel, step } = &mut *self.inner.lock();
        call(channel.as_mut().ok_or(StepError::Closed)?, step)
    }

    /// As `call`, but fails if `number` is not the current step.
    pub(super) fn call_in<R>(
        &self,
        number: u64,
        call: impl FnOnce(&mut moontide_ep::Channel, &mut Step) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        self.call(|channel, step| match step.number == number {
            true => call(channel, step),
            false => Err(StepError::Over),
        })
    }

    /// Fails if exported rows of this step exist.
    pub(super) fn check_borrowed(&self) -> Result<(), StepError> {
        match self.borrowed.load(Ordering::SeqCst) {
            0 => Ok(()),
            arrays => Err(StepError::Borrowed(arrays)),
        }
    }

    /// Fails if an output array is in memory that the ranks share.
    pub(super) fn check_target(&self, output: &mut OutputArray<'_>) -> PyResult<()> {
        let target = address_range(output.target.bytes());
        match self.regions.iter().any(|region| overlap(region.clone(), target.clone())) {
            true => Err(errors::argument("the array is in memory that ranks share; pass a private array")),
            false => Ok(()),
        }
    }

    /// Returns the outer dimensions of the grouped layout.
    pub(super) fn grouped(&self) -> [usize; 2] {
        [self.shape.experts_per_rank, self.shape.slots()]
    }
}

/// Endpoint of one rank for dispatch and combine. All ranks open the channel together, with the same settings.
///
/// - ``tokens_max``: maximum number of tokens of a rank per step; ``hidden``: elements per token; ``top_k``: experts
///   per token; ``experts_per_rank``: expert e belongs to rank e // experts_per_rank.
/// - ``dispatch_dtype``: type of tokens: "bfloat16", "float16", "float32" or "float8". ``combine_dtype``: type of
///   results [default: ``dispatch_dtype``, or "bfloat16" for "float8"].
/// - ``combine_mode``: "pull": the owner of a token reads its results; "push": the results are written to the owner.
/// - ``buffers``: 2 takes twice the memory, and lets the combine of a step share a barrier with the next dispatch (not
///   available in Python).
/// - ``auto_exclude``: excludes late ranks instead of raising RanksMissing.
/// - ``offset``: offset of the channel in the memory of the world [default: behind the previous channel].
///
/// Types that numpy does not have appear as integers of the same size: bfloat16 is uint16. A row of float8 is bytes:
/// see ``moontide.ep.reference.to_fp8``.
///
/// >>> import numpy, os, tempfile
/// >>> from moontide.ep import Channel, World
/// >>> settings = dict(tokens_max=4, hidden=8, top_k=2, experts_per_rank=4, dispatch_dtype="float32")
/// >>> world = World(os.path.join(tempfile.mkdtemp(), "ep"), 0, 1, Channel.bytes(ranks=1, **settings))
/// >>> channel = Channel(world, **settings)
/// >>> def experts(rows, rows_per_expert):  # expert e multiplies by e + 1
/// ...     return rows * numpy.arange(1, 5, dtype="float32")[:, None, None]
/// >>> tokens, routes = numpy.ones((1, 8), "float32"), numpy.array([[0, 3]])
/// >>> results, ranks = channel.moe_forward(tokens, routes, numpy.array([[0.5, 0.25]], "float32"), experts)
/// >>> results[0, 0].item(), ranks  # 0.5 × 1 + 0.25 × 4
/// (1.5, (0,))
/// >>> channel.close(), world.close()
/// (None, None)
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct Channel {
    shared: ProcessLocal<Arc<Shared>>,
}

impl Channel {
    fn shared(&self, py: Python<'_>) -> PyResult<Arc<Shared>> {
        self.shared.with(Arc::clone).map_err(|reason| unusable_error(py, "channel", reason))
    }

    /// Ends the current step with `end`. With `always`, the step is over even if `end` fails.
    fn end(
        &self,
        py: Python<'_>,
        always: bool,
        end: impl FnOnce(&mut moontide_ep::Channel) -> Result<(), WaitError> + Send,
    ) -> PyResult<()> {
        let shared = self.shared(py)?;
        let ended = py.detach(|| {
            shared.call(|channel, step| {
                shared.check_borrowed()?;
                let ended = end(channel);
                let is_over = always || ended.is_ok();
                step.number += u64::from(is_over);
                Ok((ended, if is_over { step.tokens.take() } else { None }))
            })
        });
        let (ended, _tokens) = ended.map_err(|error| error.raise(py))?;
        ended.map_err(|error| errors::wait(py, error))
    }
}

#[pymethods]
impl Channel {
    #[new]
    #[pyo3(signature = (world, *, tokens_max, hidden, top_k, experts_per_rank, dispatch_dtype="bfloat16",
        combine_dtype=None, buffers=1, combine_mode="pull", auto_exclude=false, offset=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        world: &Bound<'_, World>,
        tokens_max: usize,
        hidden: usize,
        top_k: usize,
        experts_per_rank: usize,
        dispatch_dtype: &str,
        combine_dtype: Option<&str>,
        buffers: usize,
        combine_mode: &str,
        auto_exclude: bool,
        offset: Option<u64>,
        timeout: f64,
    ) -> PyResult<Channel> {
        let timeout = seconds("timeout", timeout)?;
        let region = world.get().shape();
        let ranks = region.ranks as usize;
        let settings = Settings {
            ranks,
            tokens_max,
            hidden,
            top_k,
            experts_per_rank,
            dispatch_dtype,
            combine_dtype,
            buffers,
            combine_mode,
        };
        let shape = settings.shape()?;
        let (world, offset) = world.get().take(py, &shape, offset)?;
        // SAFETY: this process takes the range once, and it is zero before; the other ranks run the same code.
        let channel = py.detach(|| unsafe { moontide_ep::Channel::open(&world, offset, shape, timeout) });
        let channel = channel.map_err(|error| errors::open_channel(py, &error))?;
        let starts = world.bases().iter().map(|base| base.as_ptr() as usize);
        let inner = Inner { channel: Some(channel), step: Step::default() };
        let shared = Shared {
            inner: Mutex::new(inner),
            borrowed: AtomicUsize::new(0),
            shape,
            dispatch_rows: RowKind::new(shape.dispatch_dtype, hidden),
            combine_rows: RowKind::new(shape.combine_dtype, hidden),
            auto_exclude,
            rank: world.rank().0,
            regions: starts.map(|start| start..start + region.bytes as usize).collect(),
        };
        Ok(Channel { shared: ProcessLocal::new(Arc::new(shared)) })
    }

    /// Returns the memory that a channel needs in the region of each rank: the size of a World for one channel. The
    /// size is exact and covers the worst case.
    #[staticmethod]
    #[pyo3(signature = (*, ranks, tokens_max, hidden, top_k, experts_per_rank, dispatch_dtype="bfloat16",
        combine_dtype=None, buffers=1, combine_mode="pull"))]
    #[allow(clippy::too_many_arguments)] // as the constructor
    fn bytes(
        ranks: usize,
        tokens_max: usize,
        hidden: usize,
        top_k: usize,
        experts_per_rank: usize,
        dispatch_dtype: &str,
        combine_dtype: Option<&str>,
        buffers: usize,
        combine_mode: &str,
    ) -> PyResult<u64> {
        let settings = Settings {
            ranks,
            tokens_max,
            hidden,
            top_k,
            experts_per_rank,
            dispatch_dtype,
            combine_dtype,
            buffers,
            combine_mode,
        };
        settings.shape()?.bytes().map_err(errors::argument)
    }

    /// Rank of this process.
    #[getter]
    fn rank(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.shared(py)?.rank)
    }

    /// Members of the channel, as this rank sees them. Raises Excluded if this rank is not a member.
    #[getter]
    fn members<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let shared = self.shared(py)?;
        let members = py.detach(|| shared.call(|channel, _| channel.members().map_err(StepError::Wait)));
        ranks_tuple(py, members.map_err(|error| error.raise(py))?)
    }

    /// Sends tokens ``[tokens, hidden]`` to their experts. ``experts`` is an int32 or int64 array ``[tokens, top_k]``,
    /// with -1 for none; ``weights`` is a float32 array of the same shape. Does not wait. The tokens must not change
    /// until ``combine``.
    pub(super) fn start_dispatch(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<Dispatching> {
        let shared = self.shared(py)?;
        let (experts, weights) =
            (self::experts(experts, shared.shape.top_k)?, self::weights(weights, shared.shape.top_k)?);
        // If the dispatch fails, the source is dropped with the GIL held.
        let mut source = Some(shared.dispatch_rows.array("tokens", tokens, &[None])?.into_source(py)?);
        let started = py.detach(|| {
            shared.call(|channel, step| {
                let tokens = Tokens {
                    rows: source.as_ref().map_or(&[], Source::bytes),
                    experts: &experts,
                    weights: &weights,
                };
                let _ = channel.start_dispatch(tokens).map_err(StepError::Dispatch)?;
                step.number += 1;
                (step.token_count, step.scattered) = (experts.len() / shared.shape.top_k, false);
                let before = std::mem::replace(&mut step.tokens, source.take());
                Ok((step.number, before))
            })
        });
        let (step, _before) = started.map_err(|error| error.raise(py))?;
        Ok(Dispatching::new(shared, step))
    }

    /// Runs a whole step. Calls ``compute`` with the rows ``[experts_per_rank, rows, hidden]`` and the number of rows
    /// of each expert; it returns the results of the experts in the same layout. Returns the results ``[tokens,
    /// hidden]`` and the ranks whose experts took part. If ``compute`` raises, this rank contributes nothing to the
    /// step. If a rank is missing, the step is unfinished: ``exclude`` the rank and call ``abort_step``.
    #[pyo3(signature = (tokens, experts, weights, compute, *, out=None, packed=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn moe_forward<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        experts: &Bound<'py, PyAny>,
        weights: &Bound<'py, PyAny>,
        compute: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        packed: Option<&Bound<'py, PyAny>>,
        timeout: f64,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let shared = self.shared(py)?;
        seconds("timeout", timeout)?;
        // Invalid arguments fail before other ranks wait for the results of this rank.
        let count = shared.dispatch_rows.array("tokens", tokens, &[None])?.shape()[0] as usize;
        if out.is_some() {
            shared.check_target(&mut OutputArray::of(py, &shared.combine_rows, "out", out, &[count])?)?;
        }
        if packed.is_some() {
            let grouped = shared.grouped();
            let mut output = OutputArray::of(py, &shared.dispatch_rows, "packed", packed, &grouped)?;
            shared.check_target(&mut output)?;
        }
        let dispatching = self.start_dispatch(py, tokens, experts, weights)?;
        let dispatched = dispatching.wait_packed(py, packed, timeout)?;
        let computed =
            dispatched.call_compute(py, compute).and_then(|results| dispatched.scatter(py, &results));
        if let Err(error) = computed {
            // The step must end for the other ranks; the caller gets the first error.
            let _ = self.abort_step(py, timeout);
            return Err(error);
        }
        dispatched.combine(py, out, timeout)
    }

    /// Excludes ranks: the channel no longer waits for them. Repeat the wait afterwards.
    fn exclude(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        let shared = self.shared(py)?;
        let ranks = rank_set(&ranks, shared.shape.ranks as u32)?.without(RankSet::only(Rank(shared.rank)));
        let excluded = py.detach(|| {
            shared.call(|channel, _| {
                channel.exclude(ranks);
                Ok(())
            })
        });
        excluded.map_err(|error| error.raise(py))
    }

    /// Rejoins after this rank was excluded. The members admit it at the end of a step. Its own unfinished step is
    /// lost.
    #[pyo3(signature = (timeout=30.0))]
    fn rejoin(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        self.end(py, true, |channel| channel.rejoin(timeout))
    }

    /// Ends the current step without results: this rank contributes nothing to it.
    #[pyo3(signature = (timeout=30.0))]
    fn abort_step(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout: Duration = seconds("timeout", timeout)?;
        self.end(py, false, |channel| channel.abort_step(timeout))
    }

    /// Leaves the channel. Raises BufferError while arrays of a step's rows exist. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(shared) = self.shared.with(Arc::clone) else { return Ok(()) };
        let closed = py.detach(|| {
            let mut inner = shared.inner.lock();
            shared.check_borrowed()?;
            drop(inner.channel.take());
            Ok(inner.step.tokens.take())
        });
        closed.map(drop).map_err(|error: StepError| error.raise(py))?;
        drop(self.shared.take());
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match self.close(py) {
            // The exception of the block is passed on; its traceback may hold the arrays.
            Err(error) if !kind.is_none() && error.is_instance_of::<PyBufferError>(py) => Ok(()),
            closed => closed,
        }
    }

    fn __repr__(&self) -> String {
        match self.shared.with(|shared| (shared.rank, shared.shape.ranks)) {
            Ok((rank, ranks)) => format!("<moontide.ep.Channel of rank {rank} of {ranks}>"),
            Err(_) => "<moontide.ep.Channel, closed>".to_owned(),
        }
    }
}
