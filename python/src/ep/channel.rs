//! [`Channel`]: one rank's end of an exchange.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moontide_ep::{Shape, Tokens};
use moontide_heap::{Rank, RankSet, WaitError};
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::shape::{Filled, RowKind, Settings, experts, overlap, place, weights};
use super::step::{Refused, Sent};
use super::world::{World, rank_set, ranks_tuple};
use crate::arguments::seconds;
use crate::array::Source;
use crate::errors;
use crate::process::{OfProcess, gone};

/// A channel and the step that it is in, for all who hold on to them.
#[derive(Debug)]
pub(super) struct Shared {
    inner: Mutex<Inner>,
    /// Buffers of rows that were lent and not given back. Grows under the lock of `inner` only.
    pub(super) lent: AtomicUsize,
    pub(super) shape: Shape,
    pub(super) send: RowKind,
    pub(super) back: RowKind,
    pub(super) leaves_behind: bool,
    me: u32,
    /// Where the ranks' memory lies: nothing of it is ever a place for results.
    regions: Vec<Range<usize>>,
}

#[derive(Debug)]
struct Inner {
    /// `None`: closed.
    channel: Option<moontide_ep::Channel>,
    step: Step,
}

/// The step that is, or was the last.
#[derive(Default)]
pub(super) struct Step {
    pub(super) number: u64,
    /// Its tokens: those for this rank's own experts are read where they are.
    pub(super) tokens: Option<Source>,
    pub(super) token_count: usize,
    /// Whether what goes back was made.
    pub(super) scattered: bool,
}

impl Step {
    /// The bytes of its tokens.
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
    /// Runs a call with the channel. Call it with Python's lock released.
    pub(super) fn call<R>(
        &self,
        call: impl FnOnce(&mut moontide_ep::Channel, &mut Step) -> Result<R, Refused>,
    ) -> Result<R, Refused> {
        let Inner { channel, step } = &mut *self.inner.lock();
        call(channel.as_mut().ok_or(Refused::Closed)?, step)
    }

    /// The same in a step, if it is still the one.
    pub(super) fn call_in<R>(
        &self,
        number: u64,
        call: impl FnOnce(&mut moontide_ep::Channel, &mut Step) -> Result<R, Refused>,
    ) -> Result<R, Refused> {
        self.call(|channel, step| match step.number == number {
            true => call(channel, step),
            false => Err(Refused::Over),
        })
    }

    /// Nobody looks at this step's rows.
    pub(super) fn check_lent(&self) -> Result<(), Refused> {
        match self.lent.load(Ordering::SeqCst) {
            0 => Ok(()),
            arrays => Err(Refused::Lent(arrays)),
        }
    }

    /// Refuses to write over what ranks exchange.
    pub(super) fn check_target(&self, filled: &mut Filled<'_>) -> PyResult<()> {
        let target = place(filled.target.bytes());
        match self.regions.iter().any(|region| overlap(region.clone(), target.clone())) {
            true => Err(errors::argument("the array lies in memory that ranks share; pass one of your own")),
            false => Ok(()),
        }
    }

    /// Dimensions of the grouped layout.
    pub(super) fn grouped(&self) -> [usize; 2] {
        [self.shape.experts_per_rank, self.shape.slots()]
    }
}

/// One rank's end of an exchange of tokens and results. All ranks open it together, with the same settings.
///
/// - ``tokens_max``: tokens of a rank in one step at most; ``hidden``: numbers of a token; ``top_k``: experts of a token;
///   ``experts_per_rank``: expert e is the rank's e // experts_per_rank.
/// - ``send``: "bfloat16", "float16", "float32" or "float8": of tokens. ``back``: of results; as ``send``, or "bfloat16".
/// - ``returns``: "pull" if the owner of a token reads its results, "push" if they are written to it.
/// - ``buffers``: 2 takes twice the memory, and lets a step's return share a barrier with the next dispatch (not from Python).
/// - ``leaves_behind``: goes on without ranks that are late, instead of raising RanksMissing.
/// - ``offset``: of its memory, if the world has several channels; they follow each other unless it is given.
///
/// Types that numpy does not know are numbers of the same size there: bfloat16 is uint16. A row of float8 is bytes: see
/// ``moontide.ep.reference.to_fp8``.
///
/// >>> import numpy, os, tempfile
/// >>> from moontide.ep import Channel, World
/// >>> settings = dict(tokens_max=4, hidden=8, top_k=2, experts_per_rank=4, send="float32")
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
    inside: OfProcess<Arc<Shared>>,
}

impl Channel {
    fn shared(&self, py: Python<'_>) -> PyResult<Arc<Shared>> {
        self.inside.with(Arc::clone).map_err(|why| gone(py, "channel", why))
    }

    /// Ends what was begun, by `end`. With `loses` it is lost even if that fails.
    fn end(
        &self,
        py: Python<'_>,
        loses: bool,
        end: impl FnOnce(&mut moontide_ep::Channel) -> Result<(), WaitError> + Send,
    ) -> PyResult<()> {
        let shared = self.shared(py)?;
        let ended = py.detach(|| {
            shared.call(|channel, step| {
                shared.check_lent()?;
                let ended = end(channel);
                let is_over = loses || ended.is_ok();
                step.number += u64::from(is_over);
                Ok((ended, if is_over { step.tokens.take() } else { None }))
            })
        });
        let (ended, _tokens) = ended.map_err(|why| why.raise(py))?;
        ended.map_err(|error| errors::wait(py, error))
    }
}

#[pymethods]
impl Channel {
    #[new]
    #[pyo3(signature = (world, *, tokens_max, hidden, top_k, experts_per_rank, send="bfloat16", back=None, buffers=1,
        returns="pull", leaves_behind=false, offset=None, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        world: &Bound<'_, World>,
        tokens_max: usize,
        hidden: usize,
        top_k: usize,
        experts_per_rank: usize,
        send: &str,
        back: Option<&str>,
        buffers: usize,
        returns: &str,
        leaves_behind: bool,
        offset: Option<u64>,
        timeout: f64,
    ) -> PyResult<Channel> {
        let timeout = seconds("timeout", timeout)?;
        let region = world.get().shape();
        let ranks = region.ranks as usize;
        let shape =
            Settings { ranks, tokens_max, hidden, top_k, experts_per_rank, send, back, buffers, returns }
                .shape()?;
        let (world, offset) = world.get().take(py, &shape, offset)?;
        // SAFETY: a place that this process gives out once, and which is zero before; so do the other ranks, who run this.
        let channel = py.detach(|| unsafe { moontide_ep::Channel::open(&world, offset, shape, timeout) });
        let channel = channel.map_err(|error| errors::open_channel(py, &error))?;
        let starts = world.bases().iter().map(|base| base.as_ptr() as usize);
        let inner = Inner { channel: Some(channel), step: Step::default() };
        let shared = Shared {
            inner: Mutex::new(inner),
            lent: AtomicUsize::new(0),
            shape,
            send: RowKind::new(shape.send, hidden),
            back: RowKind::new(shape.back, hidden),
            leaves_behind,
            me: world.rank().0,
            regions: starts.map(|start| start..start + region.bytes as usize).collect(),
        };
        Ok(Channel { inside: OfProcess::new(Arc::new(shared)) })
    }

    /// Memory that a channel takes of each rank's: what a World must have. Exact, and for the worst case.
    #[staticmethod]
    #[pyo3(signature = (*, ranks, tokens_max, hidden, top_k, experts_per_rank, send="bfloat16", back=None, buffers=1,
        returns="pull"))]
    #[allow(clippy::too_many_arguments)] // as the constructor has them
    fn bytes(
        ranks: usize,
        tokens_max: usize,
        hidden: usize,
        top_k: usize,
        experts_per_rank: usize,
        send: &str,
        back: Option<&str>,
        buffers: usize,
        returns: &str,
    ) -> PyResult<u64> {
        let settings =
            Settings { ranks, tokens_max, hidden, top_k, experts_per_rank, send, back, buffers, returns };
        settings.shape()?.bytes().map_err(errors::argument)
    }

    /// Which rank this is.
    #[getter]
    fn rank(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.shared(py)?.me)
    }

    /// Who is waited for, as far as this rank can see. Raises Excluded if it is not itself among them.
    #[getter]
    fn members<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let shared = self.shared(py)?;
        let members = py.detach(|| shared.call(|channel, _| channel.members().map_err(Refused::Wait)));
        ranks_tuple(py, members.map_err(|why| why.raise(py))?)
    }

    /// Sends tokens ``[tokens, hidden]`` to where their experts ``[tokens, top_k]`` are, with the weights of these: int32 or
    /// int64, and float32. An expert of -1 is none. Does not wait. The tokens must stay as they are until ``combine``.
    pub(super) fn send(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<Sent> {
        let shared = self.shared(py)?;
        let (experts, weights) =
            (self::experts(experts, shared.shape.top_k)?, self::weights(weights, shared.shape.top_k)?);
        // What is not sent is given back with Python's lock held.
        let mut source = Some(shared.send.array("tokens", tokens, &[None])?.into_source(py)?);
        let sent = py.detach(|| {
            shared.call(|channel, step| {
                let tokens = Tokens {
                    rows: source.as_ref().map_or(&[], Source::bytes),
                    experts: &experts,
                    weights: &weights,
                };
                let _ = channel.send(tokens).map_err(Refused::Send)?;
                step.number += 1;
                (step.token_count, step.scattered) = (experts.len() / shared.shape.top_k, false);
                let before = std::mem::replace(&mut step.tokens, source.take());
                Ok((step.number, before))
            })
        });
        let (step, _before) = sent.map_err(|why| why.raise(py))?;
        Ok(Sent::new(shared, step))
    }

    /// A whole step. ``compute`` is called with the rows ``[experts_per_rank, rows, hidden]`` and how many each expert has, and
    /// returns what the experts made of them, in the same layout. Returns the results ``[tokens, hidden]`` and the ranks whose
    /// experts took part in them. If ``compute`` raises, nobody gets anything from this rank in this step. If a rank is
    /// missing the step is unfinished: leave it behind and ``abandon``.
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
        // What is wrong with them is said before anybody waits for this rank's results.
        let count = shared.send.array("tokens", tokens, &[None])?.shape()[0] as usize;
        if out.is_some() {
            shared.check_target(&mut Filled::of(py, &shared.back, "out", out, &[count])?)?;
        }
        if packed.is_some() {
            shared.check_target(&mut Filled::of(py, &shared.send, "packed", packed, &shared.grouped())?)?;
        }
        let received = self.send(py, tokens, experts, weights)?.wait_packed(py, packed, timeout)?;
        let computed = received.call_compute(py, compute).and_then(|made| received.scatter(py, &made));
        if let Err(error) = computed {
            // The step must end for the others; what the program is told is why.
            let _ = self.abandon(py, timeout);
            return Err(error);
        }
        received.combine(py, out, timeout)
    }

    /// Goes on without these ranks: nobody waits for them any more. Then wait again.
    fn leave_behind(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        let shared = self.shared(py)?;
        let ranks = rank_set(&ranks, shared.shape.ranks as u32)?.without(RankSet::only(Rank(shared.me)));
        let left = py.detach(|| {
            shared.call(|channel, _| {
                channel.exclude(ranks);
                Ok(())
            })
        });
        left.map_err(|why| why.raise(py))
    }

    /// Comes back after the others have gone on without this rank, which they allow at the end of a step. What it had begun
    /// is lost.
    #[pyo3(signature = (timeout=30.0))]
    fn rejoin(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds("timeout", timeout)?;
        self.end(py, true, |channel| channel.rejoin(timeout))
    }

    /// Finishes a step that was begun, without results: nobody gets anything from this rank in it.
    #[pyo3(signature = (timeout=30.0))]
    fn abandon(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout: Duration = seconds("timeout", timeout)?;
        self.end(py, false, |channel| channel.abandon(timeout))
    }

    /// Leaves the exchange. Raises BufferError while there are arrays of a step's rows. A second time it does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(shared) = self.inside.with(Arc::clone) else { return Ok(()) };
        let closed = py.detach(|| {
            let mut inner = shared.inner.lock();
            shared.check_lent()?;
            drop(inner.channel.take());
            Ok(inner.step.tokens.take())
        });
        closed.map(drop).map_err(|why: Refused| why.raise(py))?;
        drop(self.inside.take());
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
            // What the block raised is what the program is told; its traceback may well hold the arrays.
            Err(error) if !kind.is_none() && error.is_instance_of::<PyBufferError>(py) => Ok(()),
            closed => closed,
        }
    }

    fn __repr__(&self) -> String {
        match self.inside.with(|shared| (shared.me, shared.shape.ranks)) {
            Ok((me, ranks)) => format!("<moontide.ep.Channel of rank {me} of {ranks}>"),
            Err(_) => "<moontide.ep.Channel, closed>".to_owned(),
        }
    }
}
