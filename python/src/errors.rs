//! Exceptions: the classes are in `moontide/errors.py`, by the numbers of [`ErrorCode`].

use moontide_blocks::{ArenaError, BlocksError, ParkError};
use moontide_client::StoreError;
use moontide_ep::OpenError;
use moontide_heap::{DoorError, WaitError, WorldError};
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

/// An instance of the class for this code.
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

/// The exception for a failure of the store; or that of a signal that came while the call waited, which is why the
/// caller wants to stop.
pub(crate) fn store(py: Python<'_>, error: &StoreError) -> PyErr {
    if let Err(interrupt) = py.check_signals() {
        return interrupt;
    }
    raised(of_code(py, error.code(), error.to_string()))
}

/// The exception for a failure that something else describes.
pub(crate) fn other(py: Python<'_>, code: ErrorCode, message: impl ToString) -> PyErr {
    raised(of_code(py, code, message.to_string()))
}

/// The exception for something that an engine's own cache could not do.
pub(crate) fn blocks(py: Python<'_>, error: &BlocksError) -> PyErr {
    let message = error.to_string();
    raised(match error {
        BlocksError::Full(full) => module(py).and_then(|module| {
            let numbers = (full.wanted, full.free, full.longest, full.cached, full.waiting);
            let (wanted, free, longest, cached, waiting) = numbers;
            module.getattr("NoBlocks")?.call1((message, wanted, free, longest, cached, waiting))
        }),
        BlocksError::Unknown(id) => {
            module(py).and_then(|module| module.getattr("UnknownSequence")?.call1((message, id.to_bits())))
        }
        BlocksError::Busy(_) | BlocksError::Sequences { .. } | BlocksError::Readers { .. } => {
            of_code(py, ErrorCode::Busy, message)
        }
        BlocksError::Incomplete(_) => of_code(py, ErrorCode::NotReady, message),
        BlocksError::NotOwner => of_code(py, ErrorCode::InvalidArgument, message),
    })
}

/// The exception for a sequence that could not be put aside or brought back.
pub(crate) fn park(py: Python<'_>, error: &ParkError<StoreError>) -> PyErr {
    match error {
        ParkError::Blocks(error) => blocks(py, error),
        ParkError::Store(error) => store(py, error),
        ParkError::Refused => other(py, ErrorCode::NoSpace, error),
        ParkError::BlockTokens { .. } => other(py, ErrorCode::InvalidArgument, error),
    }
}

/// The exception for a cache that cannot be made.
pub(crate) fn arena(py: Python<'_>, error: &ArenaError) -> PyErr {
    let code = match error {
        ArenaError::Size { .. } | ArenaError::Blocks { .. } => ErrorCode::InvalidArgument,
        ArenaError::Region(_) => ErrorCode::NoSpace,
    };
    other(py, code, error)
}

/// The exception for ranks that did not meet.
pub(crate) fn wait(py: Python<'_>, error: WaitError) -> PyErr {
    wait_with(py, error, "wait again, or leave them behind")
}

/// The exception for ranks that did not come to a world that is being made.
pub(crate) fn join(py: Python<'_>, error: WaitError) -> PyErr {
    wait_with(py, error, "start them within the time-out, with the same settings; then join again")
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

/// The exception for a world that could not be joined.
pub(crate) fn world(py: Python<'_>, error: &WorldError) -> PyErr {
    let code = match error {
        WorldError::Wait(error) => return join(py, *error),
        WorldError::Shape(_)
        | WorldError::OtherShape { .. }
        | WorldError::Rank { .. }
        | WorldError::Door(DoorError::Path) => ErrorCode::InvalidArgument,
        WorldError::Door(DoorError::Refused(code)) => *code,
        WorldError::Door(DoorError::System { source, .. })
            if source.kind() == std::io::ErrorKind::TimedOut =>
        {
            ErrorCode::DeadlineExceeded
        }
        WorldError::Door(_) => ErrorCode::Unreachable,
        WorldError::Region(_) => ErrorCode::NoSpace,
        WorldError::Taken { .. } => ErrorCode::Busy,
    };
    other(py, code, error)
}

/// The exception for a channel that could not be opened.
pub(crate) fn open_channel(py: Python<'_>, error: &OpenError) -> PyErr {
    match error {
        OpenError::World(error) => world(py, error),
        OpenError::TooLate => other(py, ErrorCode::Gone, error),
        _ => other(py, ErrorCode::InvalidArgument, error),
    }
}

/// The exception for an argument that makes no sense.
pub(crate) fn argument(message: impl ToString) -> PyErr {
    Python::attach(|py| other(py, ErrorCode::InvalidArgument, message))
}

/// Used after it was closed.
pub(crate) fn closed(py: Python<'_>, message: String) -> PyErr {
    raised(module(py).and_then(|module| module.getattr("Closed")?.call1((message,))))
}

/// Outcomes of a batch: a list of them, or an exception that has them if any failed.
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
