//! What keeps blocks of a sequence: [`SequenceView`] to be read, [`Held`] to be saved; and [`Parked`], which keeps none.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple, PyType};

use super::cache::{Place, block_store, locked, table};
use super::rows::{Keeper, Rows};
use super::shape::Kind;
use crate::arguments::PutOptions;
use crate::errors;
use crate::process::{OfProcess, gone};
use crate::store::Store;

/// The complete tokens of a sequence as they were when it was made, to be read in place.
///
/// What it shows stays, whatever becomes of the sequence: until it is released or dropped, and everything made from it.
/// Blocks that are kept so cannot be used again; and if the last one is not full, the sequence's next token takes a new
/// block with a copy of it. So drop it, and its arrays, before the next step.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=1, kv_heads=1, dim=2, dtype="float32", block_tokens=4, blocks=8)
/// >>> seq, shared = cache.allocate([1, 2, 3, 4, 5])
/// >>> with cache.fill(seq) as fill:
/// ...     for plane in "kv":
/// ...         fill.write(plane, 0, numpy.arange(10, dtype="float32").reshape(5, 1, 2))
/// ...     fill.complete()
/// >>> view = cache.view(seq)
/// >>> cache.free(seq)
/// >>> view.tokens, [rows.shape for rows in view.rows("k", 0)]
/// (5, [(4, 1, 2), (1, 1, 2)])
/// >>> numpy.concatenate(view.rows("k", 0)).ravel().tolist()
/// [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct SequenceView {
    held: OfProcess<Arc<moontide_blocks::Held>>,
    kind: Kind,
}

impl SequenceView {
    pub(crate) fn new(held: moontide_blocks::Held, kind: Kind) -> SequenceView {
        SequenceView { held: OfProcess::new(Arc::new(held)), kind }
    }

    fn held(&self, py: Python<'_>) -> PyResult<Arc<moontide_blocks::Held>> {
        self.held.with(Arc::clone).map_err(|why| gone(py, "view", why))
    }

    fn lend<'py>(
        &self,
        py: Python<'py>,
        held: &Arc<moontide_blocks::Held>,
        rows: &moontide_blocks::Rows<'_>,
    ) -> PyResult<Bound<'py, Rows>> {
        let (start, token, head) = rows.parts();
        let place = Place::new(start, rows.tokens(), token, head);
        let keeper = Keeper::Held(Arc::clone(held));
        // SAFETY: complete rows of blocks that are held, and so neither written nor given out.
        Bound::new(py, unsafe { Rows::new(keeper, &self.kind, place.address, &place.outer(&self.kind)) })
    }
}

#[pymethods]
impl SequenceView {
    /// How many tokens there are.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.held(py)?.tokens())
    }

    /// The numbers of the blocks that they are in, in order.
    #[getter]
    fn blocks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(self.held(py)?.blocks().collect())
    }

    /// The same as a numpy array of int32, for kernels.
    fn block_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        table(py, self.held(py)?.blocks())
    }

    /// For each block its ``[tokens, heads, dim]``: as many tokens as a block has, or fewer in the last.
    fn rows<'py>(&self, py: Python<'py>, plane: &str, layer: u32) -> PyResult<Bound<'py, PyList>> {
        let (plane, layer) = self.kind.place(plane, layer)?;
        let held = self.held(py)?;
        let all = (0..held.len()).map(|at| self.lend(py, &held, &held.rows(plane, layer, at)));
        PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)
    }

    /// All of them as one ``[tokens, heads, dim]``, if their blocks follow each other; otherwise None.
    fn contiguous<'py>(
        &self,
        py: Python<'py>,
        plane: &str,
        layer: u32,
    ) -> PyResult<Option<Bound<'py, Rows>>> {
        let (plane, layer) = self.kind.place(plane, layer)?;
        let held = self.held(py)?;
        held.contiguous(plane, layer).map(|rows| self.lend(py, &held, &rows)).transpose()
    }

    /// Gives the blocks back, as far as no array has them. A second time it does nothing.
    fn release(&self) {
        drop(self.held.take());
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
        match self.held(py) {
            Ok(held) => format!("<moontide.blocks.SequenceView of {} tokens>", held.tokens()),
            Err(_) => "<moontide.blocks.SequenceView, released>".to_owned(),
        }
    }
}

/// Full blocks of a sequence that stay until they are saved: ``save`` may be called by any thread, while the engine goes on
/// with the sequence or without it.
///
/// >>> from moontide.blocks import BlockCache, namespace_of
/// >>> cache = BlockCache(layers=1, kv_heads=1, dim=2, dtype="float32", block_tokens=4, blocks=8)
/// >>> seq, shared = cache.allocate(range(9))
/// >>> with cache.fill(seq) as fill:
/// ...     fill.complete()
/// >>> with cache.hold(seq) as held:
/// ...     len(held), held.save(store, namespace_of(cache, "tiny"))
/// (2, True)
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct Held {
    held: OfProcess<Arc<Mutex<moontide_blocks::Held>>>,
}

impl Held {
    pub(crate) fn new(held: moontide_blocks::Held) -> Held {
        Held { held: OfProcess::new(Arc::new(Mutex::new(held))) }
    }

    fn held(&self, py: Python<'_>) -> PyResult<Arc<Mutex<moontide_blocks::Held>>> {
        self.held.with(Arc::clone).map_err(|why| gone(py, "hold", why))
    }
}

#[pymethods]
impl Held {
    /// Saves those that the store is not known to have. Whether it has all of them now.
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
        let held = self.held(py)?;
        py.detach(|| held.lock().save(&store)).map_err(|error| errors::store(py, &error))
    }

    /// The numbers of the blocks.
    #[getter]
    fn blocks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        Ok(locked(py, &*self.held(py)?, |held| held.blocks().collect()))
    }

    /// Gives them back. A second time it does nothing.
    fn release(&self) {
        drop(self.held.take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.release();
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(locked(py, &*self.held(py)?, |held| held.len()))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.__len__(py) {
            Ok(blocks) => format!("<moontide.blocks.Held of {blocks} blocks>"),
            Err(_) => "<moontide.blocks.Held, released>".to_owned(),
        }
    }
}

/// A sequence that was put aside: all that is needed to go on with it, but for its blocks. It can be pickled, or sent as
/// ``bytes(parked)`` and made anew with ``Parked(data)``.
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct Parked(pub(crate) moontide_blocks::Parked);

#[pymethods]
impl Parked {
    #[new]
    fn new(data: &Bound<'_, PyBytes>) -> PyResult<Parked> {
        let parked = moontide_blocks::Parked::from_bytes(data.as_bytes());
        parked.map(Parked).ok_or_else(|| errors::argument("these bytes are no sequence that was put aside"))
    }

    /// Its tokens.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.0.tokens().to_vec()
    }

    /// How many of them were complete.
    #[getter]
    fn filled(&self) -> usize {
        self.0.filled()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
        let bytes = slf.get().__bytes__(slf.py());
        Ok((slf.get_type(), PyTuple::new(slf.py(), [bytes])?))
    }

    fn __repr__(&self) -> String {
        format!("<moontide.blocks.Parked with {} tokens>", self.0.tokens().len())
    }
}
