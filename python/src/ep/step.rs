//! [`Dispatching`] and [`Dispatched`]: handles of a step.

use std::sync::Arc;
use std::time::Duration;

use moontide_ep::{DispatchError, StepInProgress, StepStage, StepTimeout};
use moontide_symmetric::{Rank, WaitError};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::channel::Shared;
use super::rows::TokenRows;
use super::shape::{OutputArray, address_range, overlap};
use super::world::{rank_set, ranks_tuple};
use crate::arguments::seconds;
use crate::blocks::table;
use crate::errors;
use crate::process::{ProcessLocal, Unusable, unusable_error};

/// Error of a call in a step.
#[derive(Debug)]
pub(super) enum StepError {
    Closed,
    /// The step has ended.
    Over,
    /// The step is in another stage.
    Stage(&'static str),
    /// Number of exported buffers of its rows.
    Borrowed(usize),
    Overlap,
    Wait(WaitError),
    Dispatch(DispatchError),
}

impl StepError {
    pub(super) fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            StepError::Closed => unusable_error(py, "channel", Unusable::Closed),
            StepError::Over => {
                errors::closed(py, "the step is over: it was combined, abandoned or lost".to_owned())
            }
            StepError::Stage(what) => errors::argument(what),
            StepError::Borrowed(arrays) => PyBufferError::new_err(format!(
                "rows of this step are lent to {arrays} arrays; drop them, and try again"
            )),
            StepError::Overlap => {
                errors::argument("the array overlaps the memory of the tokens; pass another array")
            }
            StepError::Wait(error) => errors::wait(py, error),
            StepError::Dispatch(DispatchError::Excluded) => errors::wait(py, WaitError::Excluded),
            StepError::Dispatch(error) => errors::argument(error),
        }
    }
}

impl<S: StepStage> From<StepTimeout<S>> for StepError {
    fn from(late: StepTimeout<S>) -> StepError {
        StepError::Wait(late.error)
    }
}

/// Interval at which a wait checks for signals.
const SLICE: Duration = Duration::from_millis(100);

/// Waits with the GIL released, in slices, so that signals are handled.
pub(super) fn wait_in_slices<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    mut wait: impl FnMut(Duration) -> Result<T, StepError> + Send,
) -> PyResult<Result<T, StepError>> {
    let mut left = timeout;
    loop {
        let slice = left.min(SLICE);
        left -= slice;
        match py.detach(|| wait(slice)) {
            Err(StepError::Wait(WaitError::Missing(_))) if !left.is_zero() => py.check_signals()?,
            waited => return Ok(waited),
        }
    }
}

/// As [`wait_in_slices`], for a step. Excludes late ranks if the channel has `auto_exclude`.
fn wait_in_step<T: Send>(
    py: Python<'_>,
    shared: &Shared,
    timeout: Duration,
    mut wait: impl FnMut(Duration) -> Result<T, StepError> + Send,
) -> PyResult<T> {
    loop {
        match wait_in_slices(py, timeout, &mut wait)? {
            Err(StepError::Wait(WaitError::Missing(ranks))) if shared.auto_exclude => {
                let excluded = py.detach(|| {
                    shared.call(|channel, _| {
                        channel.exclude(ranks);
                        Ok(())
                    })
                });
                excluded.map_err(|error| error.raise(py))?;
            }
            waited => return waited.map_err(|error| error.raise(py)),
        }
    }
}

/// Step whose tokens are sent. Other ranks wait for it until it is combined or aborted.
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct Dispatching {
    shared: ProcessLocal<Arc<Shared>>,
    step: u64,
}

impl Dispatching {
    pub(super) fn new(shared: Arc<Shared>, step: u64) -> Dispatching {
        Dispatching { shared: ProcessLocal::new(shared), step }
    }

    fn wait_for<'py>(
        &self,
        py: Python<'py>,
        packed: Option<OutputArray<'py>>,
        timeout: f64,
    ) -> PyResult<Dispatched> {
        let shared = self.shared.with(Arc::clone).map_err(|reason| unusable_error(py, "step", reason))?;
        let timeout = seconds("timeout", timeout)?;
        let (array, mut target) = packed.map(|OutputArray { array, target }| (array, target)).unzip();
        let sources = wait_in_step(py, &shared, timeout, |slice| {
            shared.call_in(self.step, |channel, step| {
                let rows = step.rows();
                let Some(StepInProgress::Sent(dispatching)) = channel.resume(rows) else {
                    return Err(StepError::Stage("this dispatch was waited for already"));
                };
                let dispatched = match target.as_mut().map(|target| target.bytes()) {
                    Some(packed) if overlap(address_range(packed), address_range(rows)) => {
                        return Err(StepError::Overlap);
                    }
                    Some(packed) => dispatching.wait_packed(packed, slice)?,
                    None => dispatching.wait(slice)?,
                };
                Ok(dispatched.sources())
            })
        })?;
        let sources = ranks_tuple(py, sources)?.unbind();
        Ok(Dispatched {
            shared: ProcessLocal::new(shared),
            step: self.step,
            sources,
            packed: array.map(Bound::unbind),
        })
    }
}

#[pymethods]
impl Dispatching {
    /// Waits for the tokens of all ranks. Raises RanksMissing: wait again, or exclude the missing ranks
    /// (``channel.exclude``) and wait again.
    #[pyo3(signature = (timeout=30.0))]
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Dispatched> {
        self.wait_for(py, None, timeout)
    }

    /// As ``wait``, and copies the rows to the grouped layout ``[experts_per_rank, ranks * tokens_max, hidden]``, in
    /// ``packed`` or a new array. The first ``rows_per_expert`` rows of each expert are filled.
    #[pyo3(signature = (packed=None, timeout=30.0))]
    pub(super) fn wait_packed<'py>(
        &self,
        py: Python<'py>,
        packed: Option<&Bound<'py, PyAny>>,
        timeout: f64,
    ) -> PyResult<Dispatched> {
        let shared = self.shared.with(Arc::clone).map_err(|reason| unusable_error(py, "step", reason))?;
        let mut packed = OutputArray::of(py, &shared.dispatch_rows, "packed", packed, &shared.grouped())?;
        shared.check_target(&mut packed)?;
        self.wait_for(py, Some(packed), timeout)
    }

    fn __repr__(&self) -> String {
        format!("<moontide.ep.Dispatching, step {}>", self.step)
    }
}

/// Step whose tokens arrived. Pass the results of the experts to ``scatter``, then call ``combine``.
#[pyclass(module = "moontide.ep", frozen)]
#[derive(Debug)]
pub(crate) struct Dispatched {
    shared: ProcessLocal<Arc<Shared>>,
    step: u64,
    sources: Py<PyTuple>,
    packed: Option<Py<PyAny>>,
}

impl Dispatched {
    fn shared(&self, py: Python<'_>) -> PyResult<Arc<Shared>> {
        self.shared.with(Arc::clone).map_err(|reason| unusable_error(py, "step", reason))
    }

    /// Runs a call with the dispatched step.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut moontide_ep::Dispatched<'_>) -> R + Send,
    ) -> PyResult<R> {
        let shared = self.shared(py)?;
        py.detach(|| with_dispatched(&shared, self.step, call)).map_err(|error| error.raise(py))
    }

    /// Calls `compute` with the rows.
    pub(super) fn call_compute<'py>(
        &self,
        py: Python<'py>,
        compute: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        compute.call1((self.packed(py), self.rows_per_expert(py)?))
    }
}

/// Runs a call with a dispatched step that is not combined yet. Called with the GIL released.
pub(super) fn with_dispatched<R>(
    shared: &Shared,
    step: u64,
    call: impl FnOnce(&mut moontide_ep::Dispatched<'_>) -> R,
) -> Result<R, StepError> {
    shared.call_in(step, |channel, step| match channel.resume(step.rows()) {
        Some(StepInProgress::Received(mut dispatched)) => Ok(call(&mut dispatched)),
        _ => Err(StepError::Over),
    })
}

#[pymethods]
impl Dispatched {
    /// Ranks whose tokens arrived.
    #[getter]
    fn sources(&self, py: Python<'_>) -> Py<PyTuple> {
        self.sources.clone_ref(py)
    }

    /// Rows in the grouped layout; None after ``wait``.
    #[getter]
    fn packed(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.packed.as_ref().map(|packed| packed.clone_ref(py))
    }

    /// Number of rows of each expert of this rank (masked_m), as a numpy array of int32.
    #[getter]
    fn rows_per_expert<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let rows = self.with(py, |dispatched| dispatched.rows_per_expert().to_vec())?;
        table(py, rows.into_iter())
    }

    /// Returns the slots of an expert's rows in the order of the grouped layout, as a numpy array of int32. A slot is
    /// ``source * tokens_max + token``.
    fn group<'py>(&self, py: Python<'py>, expert: usize) -> PyResult<Bound<'py, PyAny>> {
        let experts = self.shared(py)?.shape.experts_per_rank;
        if expert >= experts {
            return Err(errors::argument(format!(
                "there is no expert {expert} on this rank; it has {experts} experts"
            )));
        }
        let slots = self.with(py, |dispatched| dispatched.group(expert).to_vec())?;
        table(py, slots.into_iter())
    }

    /// Returns a zero-copy, read-only view ``[tokens, hidden]`` of the tokens of a rank. Only rows of tokens with an
    /// expert on this rank are valid. Arrays made from it must be dropped before ``combine``.
    fn tokens(&self, py: Python<'_>, source: u32) -> PyResult<TokenRows> {
        let shared = self.shared(py)?;
        rank_set(&[source], shared.shape.ranks as u32)?;
        let block = self.with(py, |dispatched| {
            let has_arrived = dispatched.sources().contains(Rank(source));
            has_arrived.then(|| dispatched.rows_of(Rank(source))).map(|block| (block.tokens, block.stride))
        })?;
        match block {
            Some((tokens, stride)) => Ok(TokenRows::new(shared, self.step, source, tokens, stride)),
            None => Err(errors::argument(format!("no tokens arrived from rank {source}; see `sources`"))),
        }
    }

    /// Takes the results of the experts, ``[experts_per_rank, ranks * tokens_max, hidden]`` of ``combine_dtype``, and
    /// computes the weighted sum of the results of each token.
    pub(super) fn scatter(&self, py: Python<'_>, results: &Bound<'_, PyAny>) -> PyResult<()> {
        let shared = self.shared(py)?;
        let grouped = shared.grouped().map(Some);
        let results = shared.combine_rows.array("results", results, &grouped)?.into_source(py)?;
        let scattered = py.detach(|| {
            with_dispatched(&shared, self.step, |dispatched| dispatched.scatter(results.bytes()))?;
            shared.call_in(self.step, |_, step| {
                step.scattered = true;
                Ok(())
            })
        });
        scattered.map_err(|error| error.raise(py))
    }

    /// Returns the results to their ranks and waits for those of this rank's own tokens. Returns their sums ``[tokens,
    /// hidden]``, in ``out`` or a new array, and the ranks whose experts took part. Raises RanksMissing: combine again,
    /// or exclude the missing ranks (``channel.exclude``) and combine again.
    #[pyo3(signature = (out=None, timeout=30.0))]
    pub(super) fn combine<'py>(
        &self,
        py: Python<'py>,
        out: Option<&Bound<'py, PyAny>>,
        timeout: f64,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (shared, timeout) = (self.shared(py)?, seconds("timeout", timeout)?);
        let count = py.detach(|| shared.call_in(self.step, |_, step| Ok(step.token_count)));
        let count = count.map_err(|error| error.raise(py))?;
        let mut out = OutputArray::of(py, &shared.combine_rows, "out", out, &[count])?;
        shared.check_target(&mut out)?;
        let started = py.detach(|| {
            shared.call_in(self.step, |channel, step| {
                let Some(StepInProgress::Received(dispatched)) = channel.resume(step.rows()) else {
                    // An earlier call started the combine and timed out.
                    return Ok(None);
                };
                shared.check_borrowed()?;
                if !step.scattered && dispatched.rows_per_expert().iter().any(|&rows| rows > 0) {
                    return Err(StepError::Stage("call scatter with the results of the experts first"));
                }
                let _ = dispatched.start_combine();
                Ok(step.tokens.take())
            })
        });
        // Dropped with the GIL held, and before results are written, possibly to the same memory.
        drop(started.map_err(|error| error.raise(py))?);
        let target = &mut out.target;
        let report = wait_in_step(py, &shared, timeout, |slice| {
            shared.call_in(self.step, |channel, step| {
                let Some(StepInProgress::Returned(combining)) = channel.resume(&[]) else {
                    return Err(StepError::Over);
                };
                let report = combining.finish(target.bytes(), slice)?;
                step.number += 1;
                Ok(report)
            })
        })?;
        Ok((out.array, ranks_tuple(py, report.ranks)?))
    }

    fn __repr__(&self) -> String {
        format!("<moontide.ep.Dispatched, step {}>", self.step)
    }
}
