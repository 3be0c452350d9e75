//! [`Sent`] and [`Received`]: a step, by its number.

use std::sync::Arc;
use std::time::Duration;

use moontide_ep::{InStep, Late, SendError, UnderWay};
use moontide_heap::{Rank, WaitError};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::channel::Shared;
use super::rows::TokenRows;
use super::shape::{Filled, overlap, place};
use super::world::{rank_set, ranks_tuple};
use crate::arguments::seconds;
use crate::blocks::table;
use crate::errors;
use crate::process::{Gone, OfProcess, gone};

/// Why a call came to nothing.
#[derive(Debug)]
pub(super) enum Refused {
    Closed,
    /// The step has ended.
    Over,
    /// The step is elsewhere.
    Stage(&'static str),
    /// So many buffers of its rows are in use.
    Lent(usize),
    Overlap,
    Wait(WaitError),
    Send(SendError),
}

impl Refused {
    pub(super) fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Refused::Closed => gone(py, "channel", Gone::Closed),
            Refused::Over => {
                errors::closed(py, "the step is over: it was combined, abandoned or lost".to_owned())
            }
            Refused::Stage(what) => errors::argument(what),
            Refused::Lent(arrays) => PyBufferError::new_err(format!(
                "rows of this step are lent to {arrays} arrays; drop them, and try again"
            )),
            Refused::Overlap => {
                errors::argument("the array has memory in common with the tokens; pass another")
            }
            Refused::Wait(error) => errors::wait(py, error),
            Refused::Send(SendError::Excluded) => errors::wait(py, WaitError::Excluded),
            Refused::Send(error) => errors::argument(error),
        }
    }
}

impl<S: InStep> From<Late<S>> for Refused {
    fn from(late: Late<S>) -> Refused {
        Refused::Wait(late.error)
    }
}

/// Between two looks at whether the program was interrupted.
const SLICE: Duration = Duration::from_millis(100);

/// Waits with Python's lock released, in slices, so that signals are seen.
pub(super) fn wait_in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    mut wait: impl FnMut(Duration) -> Result<T, Refused> + Send,
) -> PyResult<Result<T, Refused>> {
    let mut left = timeout;
    loop {
        let slice = left.min(SLICE);
        left -= slice;
        match py.detach(|| wait(slice)) {
            Err(Refused::Wait(WaitError::Missing(_))) if !left.is_zero() => py.check_signals()?,
            waited => return Ok(waited),
        }
    }
}

/// The same for a step, and goes on without those who are late, if the channel is one that does.
fn wait_in_step<T: Send>(
    py: Python<'_>,
    shared: &Shared,
    timeout: Duration,
    mut wait: impl FnMut(Duration) -> Result<T, Refused> + Send,
) -> PyResult<T> {
    loop {
        match wait_in_slices(py, timeout, &mut wait)? {
            Err(Refused::Wait(WaitError::Missing(ranks))) if shared.leaves_behind => {
                let left = py.detach(|| {
                    shared.call(|channel, _| {
                        channel.exclude(ranks);
                        Ok(())
                    })
                });
                left.map_err(|why| why.raise(py))?;
            }
            waited => return waited.map_err(|why| why.raise(py)),
        }
    }
}

/// Tokens are on their way: a step that others wait for, until it is combined or abandoned.
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct Sent {
    inside: OfProcess<Arc<Shared>>,
    step: u64,
}

impl Sent {
    pub(super) fn new(shared: Arc<Shared>, step: u64) -> Sent {
        Sent { inside: OfProcess::new(shared), step }
    }

    fn wait_for<'py>(
        &self,
        py: Python<'py>,
        packed: Option<Filled<'py>>,
        timeout: f64,
    ) -> PyResult<Received> {
        let shared = self.inside.with(Arc::clone).map_err(|why| gone(py, "step", why))?;
        let timeout = seconds("timeout", timeout)?;
        let (array, mut target) = packed.map(|Filled { array, target }| (array, target)).unzip();
        let sources = wait_in_step(py, &shared, timeout, |slice| {
            shared.call_in(self.step, |channel, step| {
                let rows = step.rows();
                let Some(UnderWay::Sent(sent)) = channel.resume(rows) else {
                    return Err(Refused::Stage("what was sent has been waited for already"));
                };
                let received = match target.as_mut().map(|target| target.bytes()) {
                    Some(packed) if overlap(place(packed), place(rows)) => return Err(Refused::Overlap),
                    Some(packed) => sent.wait_packed(packed, slice)?,
                    None => sent.wait(slice)?,
                };
                Ok(received.sources())
            })
        })?;
        let sources = ranks_tuple(py, sources)?.unbind();
        Ok(Received {
            inside: OfProcess::new(shared),
            step: self.step,
            sources,
            packed: array.map(Bound::unbind),
        })
    }
}

#[pymethods]
impl Sent {
    /// Waits for everyone's tokens. Raises RanksMissing: wait again, or leave them behind (``channel.leave_behind``) and
    /// wait again.
    #[pyo3(signature = (timeout=30.0))]
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Received> {
        self.wait_for(py, None, timeout)
    }

    /// The same, and copies the rows into the grouped layout ``[experts_per_rank, ranks * tokens_max, hidden]``, of which
    /// each expert's first ``rows_per_expert`` are filled: into ``packed``, or a new array.
    #[pyo3(signature = (packed=None, timeout=30.0))]
    pub(super) fn wait_packed<'py>(
        &self,
        py: Python<'py>,
        packed: Option<&Bound<'py, PyAny>>,
        timeout: f64,
    ) -> PyResult<Received> {
        let shared = self.inside.with(Arc::clone).map_err(|why| gone(py, "step", why))?;
        let mut packed = Filled::of(py, &shared.send, "packed", packed, &shared.grouped())?;
        shared.check_target(&mut packed)?;
        self.wait_for(py, Some(packed), timeout)
    }

    fn __repr__(&self) -> String {
        format!("<moontide.ep.Sent, step {}>", self.step)
    }
}

/// Everyone's tokens for this rank's experts are here. ``scatter`` the results of the experts, then ``combine``.
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct Received {
    inside: OfProcess<Arc<Shared>>,
    step: u64,
    sources: Py<PyTuple>,
    packed: Option<Py<PyAny>>,
}

impl Received {
    fn shared(&self, py: Python<'_>) -> PyResult<Arc<Shared>> {
        self.inside.with(Arc::clone).map_err(|why| gone(py, "step", why))
    }

    /// Looks at what was received.
    fn look<R: Send>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(&mut moontide_ep::Received<'_>) -> R + Send,
    ) -> PyResult<R> {
        let shared = self.shared(py)?;
        py.detach(|| received_in(&shared, self.step, look)).map_err(|why| why.raise(py))
    }

    /// What experts make of the rows.
    pub(super) fn call_compute<'py>(
        &self,
        py: Python<'py>,
        compute: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        compute.call1((self.packed(py), self.rows_per_expert(py)?))
    }
}

/// Runs a call with what was received, as long as it was not given back. Call it with Python's lock released.
pub(super) fn received_in<R>(
    shared: &Shared,
    step: u64,
    call: impl FnOnce(&mut moontide_ep::Received<'_>) -> R,
) -> Result<R, Refused> {
    shared.call_in(step, |channel, step| match channel.resume(step.rows()) {
        Some(UnderWay::Received(mut received)) => Ok(call(&mut received)),
        _ => Err(Refused::Over),
    })
}

#[pymethods]
impl Received {
    /// The ranks whose tokens are here.
    #[getter]
    fn sources(&self, py: Python<'_>) -> Py<PyTuple> {
        self.sources.clone_ref(py)
    }

    /// The rows in the grouped layout, if they were packed.
    #[getter]
    fn packed(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.packed.as_ref().map(|packed| packed.clone_ref(py))
    }

    /// How many rows each expert of this rank has: masked_m, a numpy array of int32.
    #[getter]
    fn rows_per_expert<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let rows = self.look(py, |received| received.rows_per_expert().to_vec())?;
        table(py, rows.into_iter())
    }

    /// The slots of an expert's rows, in the order of the grouped layout: a numpy array of int32. A slot is
    /// ``source * tokens_max + token``.
    fn group<'py>(&self, py: Python<'py>, expert: usize) -> PyResult<Bound<'py, PyAny>> {
        let experts = self.shared(py)?.shape.experts_per_rank;
        if expert >= experts {
            return Err(errors::argument(format!(
                "there is no expert {expert} here; there are {experts}, from 0"
            )));
        }
        let slots = self.look(py, |received| received.group(expert).to_vec())?;
        table(py, slots.into_iter())
    }

    /// The tokens of a rank where they lie, ``[tokens, hidden]``, read-only: those that have an expert here; what is in the
    /// other rows means nothing. Arrays made from it must be gone before ``combine``.
    fn tokens(&self, py: Python<'_>, source: u32) -> PyResult<TokenRows> {
        let shared = self.shared(py)?;
        rank_set(&[source], shared.shape.ranks as u32)?;
        let block = self.look(py, |received| {
            let is_here = received.sources().contains(Rank(source));
            is_here.then(|| received.rows_of(Rank(source))).map(|block| (block.tokens, block.stride))
        })?;
        match block {
            Some((tokens, stride)) => Ok(TokenRows::new(shared, self.step, source, tokens, stride)),
            None => {
                Err(errors::argument(format!("nothing came from rank {source}; `sources` says who sent")))
            }
        }
    }

    /// Takes what the experts made of the rows, ``[experts_per_rank, ranks * tokens_max, hidden]`` of ``back``, and makes what
    /// goes back of it: for each token the sum of its experts' results times their weights.
    pub(super) fn scatter(&self, py: Python<'_>, results: &Bound<'_, PyAny>) -> PyResult<()> {
        let shared = self.shared(py)?;
        let grouped = shared.grouped().map(Some);
        let results = shared.back.array("results", results, &grouped)?.into_source(py)?;
        let scattered = py.detach(|| {
            received_in(&shared, self.step, |received| received.scatter(results.bytes()))?;
            shared.call_in(self.step, |_, step| {
                step.scattered = true;
                Ok(())
            })
        });
        scattered.map_err(|why| why.raise(py))
    }

    /// Gives the results back and waits for those of this rank's own tokens: their sums ``[tokens, hidden]``, in ``out`` or a new
    /// array, and the ranks whose experts took part. Raises RanksMissing: combine again, or leave them behind
    /// (``channel.leave_behind``) and combine again.
    #[pyo3(signature = (out=None, timeout=30.0))]
    pub(super) fn combine<'py>(
        &self,
        py: Python<'py>,
        out: Option<&Bound<'py, PyAny>>,
        timeout: f64,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (shared, timeout) = (self.shared(py)?, seconds("timeout", timeout)?);
        let count = py.detach(|| shared.call_in(self.step, |_, step| Ok(step.token_count)));
        let count = count.map_err(|why| why.raise(py))?;
        let mut out = Filled::of(py, &shared.back, "out", out, &[count])?;
        shared.check_target(&mut out)?;
        let given = py.detach(|| {
            shared.call_in(self.step, |channel, step| {
                let Some(UnderWay::Received(received)) = channel.resume(step.rows()) else {
                    // Given before, and waited for in vain.
                    return Ok(None);
                };
                shared.check_lent()?;
                if !step.scattered && received.rows_per_expert().iter().any(|&rows| rows > 0) {
                    return Err(Refused::Stage("scatter what the experts made of the rows first"));
                }
                let _ = received.give_back();
                Ok(step.tokens.take())
            })
        });
        // Dropped here, with Python's lock, and before results may be written to the same memory.
        drop(given.map_err(|why| why.raise(py))?);
        let target = &mut out.target;
        let summed = wait_in_step(py, &shared, timeout, |slice| {
            shared.call_in(self.step, |channel, step| {
                let Some(UnderWay::Returned(returned)) = channel.resume(&[]) else {
                    return Err(Refused::Over);
                };
                let summed = returned.sum_into(target.bytes(), slice)?;
                step.number += 1;
                Ok(summed)
            })
        })?;
        Ok((out.array, ranks_tuple(py, summed.ranks)?))
    }

    fn __repr__(&self) -> String {
        format!("<moontide.ep.Received, step {}>", self.step)
    }
}
