//! [`LoopQueue`]: delivers results from runtime threads to an asyncio event loop.
//!
//! ```text
//!   loop's thread:  spawn(work) ──▶ future ─────────────────────────────────────▶ set_result
//!                        │                                                         ▲
//!   runtime thread:      └─▶ work.await ─▶ push completion, write eventfd ─▶ loop drains the queue
//! ```
//!
//! Invariant: runtime threads neither create nor modify Python objects. They move references from the loop's thread to
//! the completion without using them. They release borrowed buffers, except after the interpreter has ended.

use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use moontide_client::StoreError;
use moontide_heap::PerProcess;
use moontide_types::ErrorCode;
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use rustix::event::{EventfdFlags, eventfd};
use tokio::runtime::{Handle, Runtime};

use crate::errors;

/// Runtime threads. They wait for sockets; other threads compute and copy.
const THREADS: usize = 2;

/// Creates the value of a future, on the loop's thread.
type MakeValue = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

impl std::fmt::Debug for LoopCompletion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoopCompletion").finish_non_exhaustive()
    }
}

struct LoopCompletion {
    future: Py<PyAny>,
    make_value: MakeValue,
}

#[derive(Debug)]
struct LoopQueueState {
    completions: Mutex<Vec<LoopCompletion>>,
    wake: OwnedFd,
}

/// Queue of completions for one event loop.
#[pyclass(module = "moontide._native", frozen, name = "_LoopQueue")]
#[derive(Debug)]
pub(crate) struct LoopQueue {
    state: Arc<LoopQueueState>,
    event_loop: Py<PyAny>,
    /// Number of futures without a completion.
    pending: AtomicUsize,
    /// No more calls are spawned.
    closed: AtomicBool,
}

static RUNNING_LOOP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Returns the event loop that runs on this thread.
pub(crate) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let get = RUNNING_LOOP
        .get_or_try_init(py, || py.import("asyncio")?.getattr("get_running_loop").map(Bound::unbind))?;
    get.bind(py).call0()
}

impl LoopQueue {
    /// Creates the queue of an event loop. Called on the loop's thread.
    pub(crate) fn new(py: Python<'_>, event_loop: &Bound<'_, PyAny>) -> PyResult<Py<LoopQueue>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            errors::other(py, ErrorCode::Internal, format!("cannot create an eventfd: {error}"))
        })?;
        let number = wake.as_raw_fd();
        let made = Py::new(
            py,
            LoopQueue {
                state: Arc::new(LoopQueueState { completions: Mutex::default(), wake }),
                event_loop: event_loop.clone().unbind(),
                pending: AtomicUsize::new(0),
                closed: AtomicBool::new(true),
            },
        )?;
        // The loop references the queue from now on, so the descriptor stays open while it is registered.
        event_loop.call_method1(intern!(py, "add_reader"), (number, made.getattr(py, "_drain")?))?;
        Ok(made)
    }

    /// Keeps the queue registered until `close`. Without this, the loop removes it after the last completion.
    pub(crate) fn keep_alive(&self) {
        self.closed.store(false, Ordering::Relaxed);
    }

    pub(crate) fn is_of(&self, event_loop: &Bound<'_, PyAny>) -> bool {
        self.event_loop.is(event_loop)
    }

    /// Whether its loop has ended.
    pub(crate) fn is_orphaned(&self, py: Python<'_>) -> bool {
        let closed = self.event_loop.call_method0(py, intern!(py, "is_closed"));
        closed.and_then(|closed| closed.is_truthy(py)).unwrap_or(true)
    }

    /// Runs `work` on the runtime. `convert` makes the value of the awaitable from the result, on the loop's thread.
    pub(crate) fn spawn<'py, R, T>(
        &self,
        py: Python<'py>,
        work: impl Future<Output = Result<R, StoreError>> + Send + 'static,
        convert: impl FnOnce(Python<'_>, R) -> PyResult<T> + Send + 'static,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        R: Send + 'static,
        T: for<'a> IntoPyObject<'a>,
    {
        let future = self.event_loop.bind(py).call_method0(intern!(py, "create_future"))?;
        self.pending.fetch_add(1, Ordering::Relaxed);
        let (state, target) = (Arc::clone(&self.state), future.clone().unbind());
        runtime(py)?.spawn(async move {
            let outcome = work.await;
            let make_value: MakeValue = Box::new(move |py| {
                let value = convert(py, outcome.map_err(|error| errors::store(py, &error))?)?;
                value.into_py_any(py)
            });
            let first = {
                let mut completions = state.completions.lock();
                completions.push(LoopCompletion { future: target, make_value });
                completions.len() == 1
            };
            if first {
                // The counter cannot overflow: the loop resets it before it takes the completions.
                let _ = rustix::io::write(state.wake.as_fd(), &1u64.to_ne_bytes());
            }
        });
        Ok(future)
    }

    /// Returns an awaitable that already has its value.
    pub(crate) fn done(py: Python<'_>, value: Py<PyAny>) -> PyResult<Bound<'_, PyAny>> {
        let future = running_loop(py)?.call_method0(intern!(py, "create_future"))?;
        future.call_method1(intern!(py, "set_result"), (value,))?;
        Ok(future)
    }

    /// Lets the loop remove the queue after the last completion.
    pub(crate) fn close(&self, py: Python<'_>) {
        self.closed.store(true, Ordering::Relaxed);
        self.unregister_if_done(py);
    }

    /// Does nothing on a thread other than the loop's: the loop removes the queue when it ends.
    fn unregister_if_done(&self, py: Python<'_>) {
        let is_done = self.closed.load(Ordering::Relaxed) && self.pending.load(Ordering::Relaxed) == 0;
        if is_done && running_loop(py).is_ok_and(|running| self.event_loop.is(&running)) {
            let number = self.state.wake.as_raw_fd();
            let _ = self.event_loop.call_method1(py, intern!(py, "remove_reader"), (number,));
        }
    }
}

#[pymethods]
impl LoopQueue {
    /// Called by the loop when there are completions.
    fn _drain(&self, py: Python<'_>) -> PyResult<()> {
        let mut count = [0; 8];
        let _ = rustix::io::read(self.state.wake.as_fd(), &mut count);
        let completions = std::mem::take(&mut *self.state.completions.lock());
        self.pending.fetch_sub(completions.len(), Ordering::Relaxed);
        for LoopCompletion { future, make_value } in completions {
            let future = future.bind(py);
            // Releases everything that the call held, even if the waiting task was cancelled.
            let (set, value) = match make_value(py) {
                Ok(value) => (intern!(py, "set_result"), value),
                Err(error) => (intern!(py, "set_exception"), error.into_value(py).into_any()),
            };
            let done = future.call_method0(intern!(py, "done")).and_then(|done| done.is_truthy());
            if let Ok(false) = done
                && let Err(error) = future.call_method1(set, (value,))
            {
                // A failure of one future must not prevent the delivery to the others.
                error.write_unraisable(py, Some(future));
            }
        }
        self.unregister_if_done(py);
        Ok(())
    }
}

/// Returns the runtime of this process. A forked child has none of its parent's threads and creates its own runtime.
pub(crate) fn runtime(py: Python<'_>) -> PyResult<Handle> {
    static RUNTIME: PerProcess<Option<Runtime>> = PerProcess::new();
    let made = RUNTIME.get_or_init(|| {
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("moontide-tasks")
            .enable_all()
            .build();
        threads.ok()
    });
    match made {
        Some(runtime) => Ok(runtime.handle().clone()),
        None => Err(errors::other(py, ErrorCode::Internal, "cannot start runtime threads")),
    }
}
