//! Exceptions. Their classes are in `moontide/errors.py`, one per [`ErrorCode`].

use moontide_blocks::{ArenaError, CacheError, OutOfBlocks, SuspendError};
use moontide_client::StoreError;
use moontide_ep::OpenError;
use moontide_heap::ShmError;
use moontide_symmetric::{WaitError, WorldError};
use moontide_types::ErrorCode;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple};

static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let module = MODULE.get_or_try_init(py, || py.import("moontide.errors").map(Bound::unbind))?;
    Ok(module.bind(py))
}

/// Returns an instance of the exception class of a code.
fn of_code<'py>(py: Python<'py>, code: ErrorCode, message: String) -> PyResult<Bound<'py, PyAny>> {
    let classes = module(py)?.getattr("BY_CODE")?.cast_into::<PyDict>()?;
    let class = match classes.get_item(code as u16)? {
        Some(class) => class,
        None => module(py)?.getattr("Error")?,
    };
    class.call1((message,))
}

fn raised(made: PyResult<Bound<'_, PyAny>>) -> PyErr {
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Returns the exception for a failure of the store. If a signal arrived during the call, returns the exception of its
/// handler instead.
pub(crate) fn store(py: Python<'_>, error: &StoreError) -> PyErr {
    if let Err(interrupt) = py.check_signals() {
        return interrupt;
    }
    raised(of_code(py, error.code(), error.to_string()))
}

/// Returns the exception for a code and a message.
pub(crate) fn other(py: Python<'_>, code: ErrorCode, message: impl ToString) -> PyErr {
    raised(of_code(py, code, message.to_string()))
}

/// Returns the exception for a failed call of a block cache.
pub(crate) fn blocks(py: Python<'_>, error: &CacheError) -> PyErr {
    let message = error.to_string();
    raised(match error {
        CacheError::Full(full) => module(py).and_then(|module| {
            let OutOfBlocks { needed, free, longest, cached, held_by_readers } = *full;
            module.getattr("OutOfBlocks")?.call1((message, needed, free, longest, cached, held_by_readers))
        }),
        CacheError::Unknown(id) => {
            module(py).and_then(|module| module.getattr("UnknownSequence")?.call1((message, id.to_bits())))
        }
        CacheError::Busy(_) | CacheError::Sequences { .. } | CacheError::Readers { .. } => {
            of_code(py, ErrorCode::Busy, message)
        }
        CacheError::Incomplete(_) => of_code(py, ErrorCode::NotReady, message),
        CacheError::NotOwner => of_code(py, ErrorCode::InvalidArgument, message),
    })
}

/// Returns the exception for a sequence that could not be suspended, resumed or restored.
pub(crate) fn suspend(py: Python<'_>, error: &SuspendError<StoreError>) -> PyErr {
    match error {
        SuspendError::Blocks(error) => blocks(py, error),
        SuspendError::Store(error) => store(py, error),
        SuspendError::Refused => other(py, ErrorCode::NoSpace, error),
        SuspendError::BlockTokens { .. } => other(py, ErrorCode::InvalidArgument, error),
    }
}

/// Returns the exception for a cache that could not be created.
pub(crate) fn arena(py: Python<'_>, error: &ArenaError) -> PyErr {
    let code = match error {
        ArenaError::Size { .. } | ArenaError::Blocks { .. } => ErrorCode::InvalidArgument,
        ArenaError::Region(_) => ErrorCode::NoSpace,
    };
    other(py, code, error)
}

/// Returns the exception for a barrier that ranks did not reach.
pub(crate) fn wait(py: Python<'_>, error: WaitError) -> PyErr {
    wait_with(py, error, "wait again, or exclude them")
}

/// Returns the exception for ranks that did not join a new world.
pub(crate) fn join(py: Python<'_>, error: WaitError) -> PyErr {
    wait_with(py, error, "start them within the timeout, with the same settings, and join again")
}

fn wait_with(py: Python<'_>, error: WaitError, advice: &str) -> PyErr {
    raised(module(py).and_then(|module| match error {
        WaitError::Missing(ranks) => {
            let named = PyTuple::new(py, ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())?;
            let message = format!("{error}; {advice}");
            module.getattr("RanksMissing")?.call1((message, named))
        }
        WaitError::Excluded => module.getattr("Excluded")?.call1((format!("{error}; it may rejoin"),)),
    }))
}

/// Returns the exception for a world that could not be joined.
pub(crate) fn world(py: Python<'_>, error: &WorldError) -> PyErr {
    let code = match error {
        WorldError::Wait(error) => return join(py, *error),
        WorldError::Shape(_)
        | WorldError::OtherShape { .. }
        | WorldError::Rank { .. }
        | WorldError::Shm(ShmError::Path) => ErrorCode::InvalidArgument,
        WorldError::Shm(ShmError::Refused(code)) => *code,
        WorldError::Shm(ShmError::System { source, .. }) if source.kind() == std::io::ErrorKind::TimedOut => {
            ErrorCode::DeadlineExceeded
        }
        WorldError::Shm(_) => ErrorCode::Unreachable,
        WorldError::Region(_) => ErrorCode::NoSpace,
        WorldError::RankInUse { .. } | WorldError::AlreadyReserved { .. } | WorldError::NotEmpty => {
            ErrorCode::Busy
        }
    };
    other(py, code, error)
}

/// Returns the exception for a channel that could not be opened.
pub(crate) fn open_channel(py: Python<'_>, error: &OpenError) -> PyErr {
    match error {
        OpenError::World(error) => world(py, error),
        OpenError::NotOpenedBefore => other(py, ErrorCode::Gone, error),
        _ => other(py, ErrorCode::InvalidArgument, error),
    }
}

/// Returns the exception for an invalid argument.
pub(crate) fn argument(message: impl ToString) -> PyErr {
    Python::attach(|py| other(py, ErrorCode::InvalidArgument, message))
}

/// Returns the exception for a use after close.
pub(crate) fn closed(py: Python<'_>, message: String) -> PyErr {
    raised(module(py).and_then(|module| module.getattr("Closed")?.call1((message,))))
}

/// Returns the outcomes of a batch as a list, or raises an exception that contains them if any failed.
pub(crate) fn batch<'py, T>(
    py: Python<'py>,
    outcomes: Vec<Result<T, StoreError>>,
) -> PyResult<Bound<'py, PyList>>
where
    T: IntoPyObject<'py>,
{
    let mut failed = false;
    let mut all = Vec::with_capacity(outcomes.len());
    for outcome in outcomes {
        all.push(match outcome {
            Ok(value) => value.into_bound_py_any(py)?,
            Err(error) => {
                failed = true;
                of_code(py, error.code(), error.to_string())?
            }
        });
    }
    let list = PyList::new(py, all)?;
    if !failed {
        return Ok(list);
    }
    Err(raised(module(py).and_then(|module| module.getattr("BatchError")?.call1((list,)))))
}
