//! Handles of sequences: [`SequenceView`] pins blocks for reading, [`PinnedBlocks`] pins them for saving,
//! [`SuspendedSequence`] pins none.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple, PyType};

use super::cache::{RowView, block_store, locked, table};
use super::rows::{MemoryOwner, Rows};
use super::shape::ElementKind;
use crate::arguments::PutOptions;
use crate::errors;
use crate::process::{ProcessLocal, unusable_error};
use crate::store::Store;

/// Zero-copy, read-only snapshot of the complete tokens of a sequence.
///
/// The snapshot does not change, even if the sequence is freed, until the view and everything made from it are released
/// or dropped. Its blocks cannot be reused before. While a view covers a partial last block, the next token of the
/// sequence goes to a copy of that block. Drop the view and its arrays before the next step.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=1, kv_heads=1, dim=2, dtype="float32", block_tokens=4, blocks=8)
/// >>> seq, cached_tokens = cache.allocate([1, 2, 3, 4, 5])
/// >>> with cache.writer(seq) as writer:
/// ...     for plane in "kv":
/// ...         writer.write(plane, 0, numpy.arange(10, dtype="float32").reshape(5, 1, 2))
/// ...     writer.mark_written()
/// >>> view = cache.view(seq)
/// >>> cache.free(seq)
/// >>> view.tokens, [rows.shape for rows in view.rows("k", 0)]
/// (5, [(4, 1, 2), (1, 1, 2)])
/// >>> numpy.concatenate(view.rows("k", 0)).ravel().tolist()
/// [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct SequenceView {
    pinned: ProcessLocal<Arc<moontide_blocks::PinnedBlocks>>,
    kind: ElementKind,
}

impl SequenceView {
    pub(crate) fn new(pinned: moontide_blocks::PinnedBlocks, kind: ElementKind) -> SequenceView {
        SequenceView { pinned: ProcessLocal::new(Arc::new(pinned)), kind }
    }

    fn pinned(&self, py: Python<'_>) -> PyResult<Arc<moontide_blocks::PinnedBlocks>> {
        self.pinned.with(Arc::clone).map_err(|reason| unusable_error(py, "view", reason))
    }

    fn export<'py>(
        &self,
        py: Python<'py>,
        pinned: &Arc<moontide_blocks::PinnedBlocks>,
        rows: &moontide_blocks::Rows<'_>,
    ) -> PyResult<Bound<'py, Rows>> {
        let (start, token, head) = rows.parts();
        let view = RowView::new(start, rows.tokens(), token, head);
        let owner = MemoryOwner::Pinned(Arc::clone(pinned));
        // SAFETY: complete rows of pinned blocks, which are neither written nor allocated again.
        Bound::new(py, unsafe { Rows::new(owner, &self.kind, view.address, &view.outer(&self.kind)) })
    }
}

#[pymethods]
impl SequenceView {
    /// Number of tokens.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.pinned(py)?.tokens())
    }

    /// Numbers of their blocks, in order.
    #[getter]
    fn blocks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.pinned(py)?.blocks().collect())
    }

    /// Returns the block numbers as a numpy array of int32, for kernels.
    fn block_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        table(py, self.pinned(py)?.blocks())
    }

    /// Returns one array ``[tokens, heads, dim]`` per block. The last one may have fewer tokens.
    fn rows<'py>(&self, py: Python<'py>, plane: &str, layer: u32) -> PyResult<Bound<'py, PyList>> {
        let (plane, layer) = self.kind.plane_and_layer(plane, layer)?;
        let pinned = self.pinned(py)?;
        let all = (0..pinned.len()).map(|at| self.export(py, &pinned, &pinned.rows(plane, layer, at)));
        PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)
    }

    /// Returns one array ``[tokens, heads, dim]`` for all tokens if their blocks are adjacent, otherwise None.
    fn contiguous<'py>(
        &self,
        py: Python<'py>,
        plane: &str,
        layer: u32,
    ) -> PyResult<Option<Bound<'py, Rows>>> {
        let (plane, layer) = self.kind.plane_and_layer(plane, layer)?;
        let pinned = self.pinned(py)?;
        pinned.contiguous(plane, layer).map(|rows| self.export(py, &pinned, &rows)).transpose()
    }

    /// Releases the blocks; those with arrays are released with the last array. Further calls do nothing.
    fn release(&self) {
        drop(self.pinned.take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.release();
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.tokens(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.pinned(py) {
            Ok(pinned) => format!("<moontide.blocks.SequenceView of {} tokens>", pinned.tokens()),
            Err(_) => "<moontide.blocks.SequenceView, released>".to_owned(),
        }
    }
}

/// Pinned full blocks of a sequence. Any thread can ``save`` them while the inference engine continues or frees the
/// sequence.
///
/// >>> from moontide.blocks import BlockCache, namespace_of
/// >>> cache = BlockCache(layers=1, kv_heads=1, dim=2, dtype="float32", block_tokens=4, blocks=8)
/// >>> seq, cached_tokens = cache.allocate(range(9))
/// >>> with cache.writer(seq) as writer:
/// ...     writer.mark_written()
/// >>> with cache.pin_blocks(seq) as pinned:
/// ...     len(pinned), pinned.save(store, namespace_of(cache, "tiny"))
/// (2, True)
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct PinnedBlocks {
    pinned: ProcessLocal<Arc<Mutex<moontide_blocks::PinnedBlocks>>>,
}

impl PinnedBlocks {
    pub(crate) fn new(pinned: moontide_blocks::PinnedBlocks) -> PinnedBlocks {
        PinnedBlocks { pinned: ProcessLocal::new(Arc::new(Mutex::new(pinned))) }
    }

    fn pinned(&self, py: Python<'_>) -> PyResult<Arc<Mutex<moontide_blocks::PinnedBlocks>>> {
        self.pinned.with(Arc::clone).map_err(|reason| unusable_error(py, "set of pinned blocks", reason))
    }
}

#[pymethods]
impl PinnedBlocks {
    /// Saves the blocks that the store is not known to have. Returns whether the store has all of them now.
    #[pyo3(signature = (store, namespace, *, part="0", options=None))]
    fn save(
        &self,
        py: Python<'_>,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
        options: Option<&Bound<'_, PutOptions>>,
    ) -> PyResult<bool> {
        let store = block_store(py, store, namespace, part, options)?;
        let pinned = self.pinned(py)?;
        py.detach(|| pinned.lock().save(&store)).map_err(|error| errors::store(py, &error))
    }

    /// Numbers of the blocks.
    #[getter]
    fn blocks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(locked(py, &*self.pinned(py)?, |pinned| pinned.blocks().collect()))
    }

    /// Releases the blocks. Further calls do nothing.
    fn release(&self) {
        drop(self.pinned.take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.release();
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(locked(py, &*self.pinned(py)?, |pinned| pinned.len()))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.__len__(py) {
            Ok(blocks) => format!("<moontide.blocks.PinnedBlocks of {blocks} blocks>"),
            Err(_) => "<moontide.blocks.PinnedBlocks, released>".to_owned(),
        }
    }
}

/// Suspended sequence: everything needed to resume it, except its blocks. It can be pickled, or sent as
/// ``bytes(suspended)`` and decoded with ``SuspendedSequence(data)``.
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct SuspendedSequence(pub(crate) moontide_blocks::SuspendedSequence);

#[pymethods]
impl SuspendedSequence {
    #[new]
    fn new(data: &Bound<'_, PyBytes>) -> PyResult<SuspendedSequence> {
        let suspended = moontide_blocks::SuspendedSequence::from_bytes(data.as_bytes());
        suspended
            .map(SuspendedSequence)
            .ok_or_else(|| errors::argument("the bytes are not a valid suspended sequence"))
    }

    /// Tokens of the sequence.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.0.tokens().to_vec()
    }

    /// Number of complete tokens.
    #[getter]
    fn computed_tokens(&self) -> usize {
        self.0.computed_tokens()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
        let bytes = slf.get().__bytes__(slf.py());
        Ok((slf.get_type(), PyTuple::new(slf.py(), [bytes])?))
    }

    fn __repr__(&self) -> String {
        format!("<moontide.blocks.SuspendedSequence with {} tokens>", self.0.tokens().len())
    }
}
