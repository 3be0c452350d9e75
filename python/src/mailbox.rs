//! [`Mailbox`]: how what was done on other threads reaches an event loop of asyncio.
//!
//! ```text
//!   loop's thread:  post(work) ──▶ future ──────────────────────────────────────▶ set_result
//!                        │                                                         ▲
//!   our runtime:         └─▶ work.await ─▶ letter into the box, eventfd ─▶ loop reads, empties the box
//! ```
//!
//! Invariant: threads of the runtime make and change nothing of Python's. They carry its objects from the loop's thread to
//! the letter, unopened; what a call borrowed they give back, which they do not when the interpreter has ended.

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

/// Threads that carry calls. They wait for sockets; what computes or copies is on threads of its own.
const THREADS: usize = 2;

/// What a future is to become, made on the loop's thread.
type Content = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

impl std::fmt::Debug for Letter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Letter").finish_non_exhaustive()
    }
}

struct Letter {
    future: Py<PyAny>,
    content: Content,
}

#[derive(Debug)]
struct Shelf {
    letters: Mutex<Vec<Letter>>,
    wake: OwnedFd,
}

/// The box of one event loop.
#[pyclass(module = "moontide._native", frozen, name = "_Mailbox")]
#[derive(Debug)]
pub(crate) struct Mailbox {
    shelf: Arc<Shelf>,
    event_loop: Py<PyAny>,
    /// Futures whose letters have not come yet.
    awaited: AtomicUsize,
    /// Nobody posts any more.
    closed: AtomicBool,
}

static RUNNING_LOOP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The loop that runs on this thread.
pub(crate) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let get = RUNNING_LOOP
        .get_or_try_init(py, || py.import("asyncio")?.getattr("get_running_loop").map(Bound::unbind))?;
    get.bind(py).call0()
}

impl Mailbox {
    /// A new box of an event loop, on its thread.
    pub(crate) fn new(py: Python<'_>, event_loop: &Bound<'_, PyAny>) -> PyResult<Py<Mailbox>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| errors::other(py, ErrorCode::Internal, format!("no eventfd: {error}")))?;
        let number = wake.as_raw_fd();
        let made = Py::new(
            py,
            Mailbox {
                shelf: Arc::new(Shelf { letters: Mutex::default(), wake }),
                event_loop: event_loop.clone().unbind(),
                awaited: AtomicUsize::new(0),
                closed: AtomicBool::new(true),
            },
        )?;
        // The loop holds the box from now on, so that the number stays the box's as long as the loop knows it.
        event_loop.call_method1(intern!(py, "add_reader"), (number, made.getattr(py, "_empty")?))?;
        Ok(made)
    }

    /// Somebody will post into it until `close`. Before, the loop forgets it with the last letter.
    pub(crate) fn keep(&self) {
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

    /// Runs `work` on threads of ours; the awaitable becomes what `made` makes of its outcome on the loop's thread.
    pub(crate) fn post<'py, R, T>(
        &self,
        py: Python<'py>,
        work: impl Future<Output = Result<R, StoreError>> + Send + 'static,
        made: impl FnOnce(Python<'_>, R) -> PyResult<T> + Send + 'static,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        R: Send + 'static,
        T: for<'a> IntoPyObject<'a>,
    {
        let future = self.event_loop.bind(py).call_method0(intern!(py, "create_future"))?;
        self.awaited.fetch_add(1, Ordering::Relaxed);
        let (shelf, promised) = (Arc::clone(&self.shelf), future.clone().unbind());
        runtime(py)?.spawn(async move {
            let outcome = work.await;
            let content: Content = Box::new(move |py| {
                let value = made(py, outcome.map_err(|error| errors::store(py, &error))?)?;
                value.into_py_any(py)
            });
            let first = {
                let mut letters = shelf.letters.lock();
                letters.push(Letter { future: promised, content });
                letters.len() == 1
            };
            if first {
                // It cannot be full: it is emptied before the letters are taken.
                let _ = rustix::io::write(shelf.wake.as_fd(), &1u64.to_ne_bytes());
            }
        });
        Ok(future)
    }

    /// An awaitable that has its value already.
    pub(crate) fn done(py: Python<'_>, value: Py<PyAny>) -> PyResult<Bound<'_, PyAny>> {
        let future = running_loop(py)?.call_method0(intern!(py, "create_future"))?;
        future.call_method1(intern!(py, "set_result"), (value,))?;
        Ok(future)
    }

    /// Lets the loop forget the box when the last letter has come.
    pub(crate) fn close(&self, py: Python<'_>) {
        self.closed.store(true, Ordering::Relaxed);
        self.leave_if_done(py);
    }

    /// On another thread than the loop's nothing is done: the loop forgets it at its end.
    fn leave_if_done(&self, py: Python<'_>) {
        let is_done = self.closed.load(Ordering::Relaxed) && self.awaited.load(Ordering::Relaxed) == 0;
        if is_done && running_loop(py).is_ok_and(|running| self.event_loop.is(&running)) {
            let number = self.shelf.wake.as_raw_fd();
            let _ = self.event_loop.call_method1(py, intern!(py, "remove_reader"), (number,));
        }
    }
}

#[pymethods]
impl Mailbox {
    /// Called by the loop when there are letters.
    fn _empty(&self, py: Python<'_>) -> PyResult<()> {
        let mut count = [0; 8];
        let _ = rustix::io::read(self.shelf.wake.as_fd(), &mut count);
        let letters = std::mem::take(&mut *self.shelf.letters.lock());
        self.awaited.fetch_sub(letters.len(), Ordering::Relaxed);
        for Letter { future, content } in letters {
            let future = future.bind(py);
            // What the call has held is let go of here, also if whoever waited has given up.
            let (set, value) = match content(py) {
                Ok(value) => (intern!(py, "set_result"), value),
                Err(error) => (intern!(py, "set_exception"), error.into_value(py).into_any()),
            };
            let done = future.call_method0(intern!(py, "done")).and_then(|done| done.is_truthy());
            if let Ok(false) = done
                && let Err(error) = future.call_method1(set, (value,))
            {
                // The others are not to wait for ever because of this one.
                error.write_unraisable(py, Some(future));
            }
        }
        self.leave_if_done(py);
        Ok(())
    }
}

/// The runtime of this process. A forked child has none of its parent's threads, and gets one of its own.
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
        None => Err(errors::other(py, ErrorCode::Internal, "no threads can be started")),
    }
}
