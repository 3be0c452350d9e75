//! The Python module `moontide._native`: the Python API over [`moontide_client`].
//!
//! Calls release the GIL while they wait. Memory is passed without a copy where possible: `array` imports the memory of
//! Python objects (buffer protocol, DLPack, `__array_interface__`), `pinned` and `view` export objects of the store.
//! The docstrings document the calls; `moontide/_native.pyi` has the types.
//!
//! Reading order: `process` (fork), `errors`, `arguments`, `array`, `pinned`, `view`, `tensor`, `store`, `addresses`
//! (for callers with pointers), `invalidations`, `loop_queue` and `async_store`, `local`. `blocks` is the paged KV
//! cache over [`moontide_blocks`]. `ep` is dispatch and combine of expert tokens over [`moontide_ep`]. `rank_store` is
//! for ranks that write to each other's memory.

mod address;
mod addresses;
mod arguments;
mod array;
mod async_store;
mod blocks;
mod dlpack;
mod ep;
mod errors;
mod invalidations;
mod local;
mod loop_queue;
mod operators;
mod pinned;
mod process;
mod rank_store;
mod store;
mod tensor;
mod view;

use pyo3::prelude::*;

/// Native part of the package `moontide`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::address::RawMemory;
    #[pymodule_export]
    use crate::arguments::PutOptions;
    #[pymodule_export]
    use crate::async_store::AsyncStore;
    #[pymodule_export]
    use crate::blocks::{BlockCache, PinnedBlocks, Rows, SequenceView, SequenceWriter, SuspendedSequence};
    #[pymodule_export]
    use crate::ep::{Channel, Dispatched, Dispatching, TokenRows, World};
    #[pymodule_export]
    use crate::invalidations::Invalidations;
    #[pymodule_export]
    use crate::local::{LocalMaster, LocalNode};
    #[pymodule_export]
    use crate::rank_store::{KernelCell, PendingRecord, PushWriter, RankStore};
    #[pymodule_export]
    use crate::store::Store;
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
