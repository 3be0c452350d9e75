//! The Python module `moontide._native`: what Python programs call, over [`moontide_client`].
//!
//! Python waits with its lock released, and memory crosses without a copy wherever it can: `array` takes what objects
//! lend (buffers, DLPack, `__array_interface__`), `pinned` and `view` lend what the store has. Whatever is said here about
//! calls is said in the docstrings; `moontide/_native.pyi` has the types.
//!
//! Reading order: `process` (forks), `errors`, `arguments`, `array`, `pinned`, `view`, `tensor`, `store`, `addresses` (for
//! callers with pointers), `departures`, `mailbox` and `tasks`, `local`; `blocks` is the engine's own cache, over
//! [`moontide_blocks`], and `ep` the exchange of experts' tokens, over [`moontide_ep`]; `hop` is for ranks
//! that write into each other's memory.

mod address;
mod addresses;
mod arguments;
mod array;
mod blocks;
mod departures;
mod dlpack;
mod ep;
mod errors;
mod hop;
mod local;
mod mailbox;
mod pinned;
mod process;
mod store;
mod tasks;
mod tensor;
mod view;

use pyo3::prelude::*;

/// What is native of the package `moontide`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::address::Memory;
    #[pymodule_export]
    use crate::arguments::PutOptions;
    #[pymodule_export]
    use crate::blocks::{BlockCache, Fill, Held, Parked, Rows, SequenceView};
    #[pymodule_export]
    use crate::departures::Departures;
    #[pymodule_export]
    use crate::ep::{Channel, Received, Sent, TokenRows, World};
    #[pymodule_export]
    use crate::hop::{Hop, HopAwaited, HopCell, HopPush};
    #[pymodule_export]
    use crate::local::{LocalMaster, LocalNode};
    #[pymodule_export]
    use crate::store::Store;
    #[pymodule_export]
    use crate::tasks::AsyncStore;
    #[pymodule_export]
    use crate::tensor::Tensor;
    #[pymodule_export]
    use crate::view::View;

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
