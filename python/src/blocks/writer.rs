//! [`SequenceWriter`]: writes rows of a sequence.

use std::sync::Arc;

use moontide_blocks::Cache;
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange};

use super::cache::{RowView, locked};
use super::rows::{MemoryOwner, Rows};
use super::shape::ElementKind;
use crate::array::{Array, Source};
use crate::errors;
use crate::process::{ProcessLocal, Unusable, unusable_error};
use crate::store::{COPY_WITH_GIL_MAX, Store};

/// Writer shared by a [`SequenceWriter`] and its arrays; dropped with the last of them.
#[derive(Debug)]
pub(crate) struct WriterGuard(Mutex<moontide_blocks::SequenceWriter>);

/// Writer of the rows of all tokens of a sequence that have none yet. ``with cache.writer(seq) as writer`` commits at
/// the end of the block, and discards the rows if the block raises.
///
/// ``write`` copies arrays. ``rows`` exports the memory itself; all arrays made from it must be dropped before the
/// commit, because committed rows are visible to readers. While a sequence has a writer it can only be appended to and
/// read.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=1, kv_heads=1, dim=2, dtype="float32", block_tokens=4, blocks=8)
/// >>> seq, cached_tokens = cache.allocate([1, 2, 3, 4, 5])
/// >>> with cache.writer(seq) as writer:
/// ...     writer.tokens
/// ...     writer.write("k", 0, numpy.ones((5, 1, 2), "float32"))
/// ...     for rows in writer.rows("v", 0):
/// ...         rows.numpy()[:] = 2.0
/// ...     del rows
/// ...     writer.mark_written()
/// range(0, 5)
/// >>> cache.computed_tokens(seq)
/// 5
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct SequenceWriter {
    inner: ProcessLocal<WriterInner>,
    kind: ElementKind,
    sequence: u64,
    /// Address range of the arena. A write from inside the arena goes through a temporary copy.
    arena: std::ops::Range<usize>,
}

#[derive(Clone, Debug)]
struct WriterInner {
    guard: Arc<WriterGuard>,
    cache: Arc<Mutex<Cache>>,
}

impl SequenceWriter {
    pub(crate) fn new(
        writer: moontide_blocks::SequenceWriter,
        cache: Arc<Mutex<Cache>>,
        kind: ElementKind,
        arena: std::ops::Range<usize>,
    ) -> SequenceWriter {
        let sequence = writer.id().to_bits();
        let guard = Arc::new(WriterGuard(Mutex::new(writer)));
        SequenceWriter { inner: ProcessLocal::new(WriterInner { guard, cache }), kind, sequence, arena }
    }

    fn guard(&self, py: Python<'_>) -> PyResult<Arc<WriterGuard>> {
        self.inner.with(|inner| Arc::clone(&inner.guard)).map_err(|reason| closed(py, reason))
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut moontide_blocks::SequenceWriter) -> R + Send,
    ) -> PyResult<R> {
        let guard = self.guard(py)?;
        Ok(locked(py, &guard.0, call))
    }

    /// Returns the number of tokens of an array, or fails if its shape or type does not match the cache.
    fn tokens_of(&self, array: &Array) -> PyResult<usize> {
        let shape = self.kind.shape;
        let (per_token, plain) = (shape.heads() * shape.dim(), self.kind.plain_dtype());
        let is_of_kind = array.dtype == Some(self.kind.dtype) || array.dtype == Some(plain);
        let lengths = array.shape();
        let product = |lengths: &[u64]| lengths.iter().fold(1, |all: u64, len| all.saturating_mul(*len));
        match lengths.split_first() {
            Some((tokens, rest)) if is_of_kind && product(rest) == per_token as u64 => Ok(*tokens as usize),
            _ => Err(errors::argument(format!(
                "rows of this cache must be an array [tokens, {}, {}] of {}, not {lengths:?} of {}",
                shape.heads(),
                shape.dim(),
                self.kind.dtype.name(),
                array.dtype.map_or("another type", |dtype| dtype.name()),
            ))),
        }
    }
}

fn closed(py: Python<'_>, reason: Unusable) -> PyErr {
    match reason {
        Unusable::Closed => {
            errors::closed(py, "the writer is closed: it was committed or aborted".to_owned())
        }
        Unusable::Forked => unusable_error(py, "writer", reason),
    }
}

#[pymethods]
impl SequenceWriter {
    /// Id of the sequence.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Tokens whose rows are not written yet, as positions in the sequence.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        let tokens = self.with(py, |writer| writer.tokens())?;
        PyRange::new(py, tokens.start as isize, tokens.end as isize)
    }

    /// Copies an array ``[tokens, heads, dim]`` to the rows, from the first token of ``tokens`` on.
    fn write(&self, py: Python<'_>, plane: &str, layer: u32, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let (plane, layer) = self.kind.plane_and_layer(plane, layer)?;
        let array = Array::of(array)?;
        let tokens = self.tokens_of(&array)?;
        let source = array.into_source(py)?;
        let address = source.bytes().as_ptr() as usize;
        let is_ours = address < self.arena.end && self.arena.start < address + source.bytes().len();
        // Source and target may overlap, which the copy of bytes does not allow.
        let source = if is_ours { Source::Collected(source.bytes().to_vec()) } else { source };
        let write = |writer: &mut moontide_blocks::SequenceWriter| {
            let left = writer.tokens().len();
            if tokens <= left {
                writer.write(plane, layer, source.bytes());
            }
            left
        };
        let left = match source.bytes().len() {
            ..=COPY_WITH_GIL_MAX => self.with(py, write)?,
            _ => {
                let guard = self.guard(py)?;
                py.detach(|| write(&mut guard.0.lock()))
            }
        };
        match tokens <= left {
            true => Ok(()),
            false => {
                Err(errors::argument(format!("{tokens} tokens given, but only {left} remain to be written")))
            }
        }
    }

    /// Returns the memory of the rows for writing, one array per block. All arrays made from it must be dropped before
    /// the commit.
    fn rows<'py>(&self, py: Python<'py>, plane: &str, layer: u32) -> PyResult<Bound<'py, PyList>> {
        let (plane, layer) = self.kind.plane_and_layer(plane, layer)?;
        let guard = self.guard(py)?;
        let parts = locked(py, &guard.0, |writer| {
            let (mut parts, tokens) = (Vec::new(), writer.tokens());
            let mut at = tokens.start;
            while at < tokens.end {
                let mut rows = writer.rows(plane, layer, at);
                let (start, token, head) = rows.parts();
                parts.push(RowView::new(start, rows.tokens(), token, head));
                at += rows.tokens();
            }
            parts
        });
        let rows = parts.into_iter().map(|view| {
            let owner = MemoryOwner::Writer(Arc::clone(&guard));
            // SAFETY: rows of the writer, which only it writes and no reader sees, as long as it is not dropped.
            unsafe { Rows::new(owner, &self.kind, view.address, &view.outer(&self.kind)) }
        });
        PyList::new(py, rows.map(|rows| Bound::new(py, rows)).collect::<PyResult<Vec<_>>>()?)
    }

    /// Marks the rows of the next ``tokens`` tokens as written in all layers and planes; by default, of all tokens.
    #[pyo3(signature = (tokens=None))]
    fn mark_written(&self, py: Python<'_>, tokens: Option<usize>) -> PyResult<()> {
        let left = self.with(py, |writer| {
            let left = writer.tokens().len();
            if tokens.is_none_or(|tokens| tokens <= left) {
                writer.mark_written(tokens.unwrap_or(left));
            }
            left
        })?;
        match tokens {
            Some(tokens) if tokens > left => {
                Err(errors::argument(format!("{tokens} tokens given, but only {left} remain to be written")))
            }
            _ => Ok(()),
        }
    }

    /// Loads rows from a store, up to the first block that the store does not have. Does not block the cache. Returns
    /// the number of loaded tokens, which are marked as written. With ``skip_last_token`` the last token is not loaded.
    #[pyo3(signature = (store, namespace, *, part="0", skip_last_token=true))]
    fn restore(
        &self,
        py: Python<'_>,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
        skip_last_token: bool,
    ) -> PyResult<usize> {
        let store = super::cache::block_store(py, store, namespace, part, None)?;
        let guard = self.guard(py)?;
        let restored = py.detach(|| {
            let mut writer = guard.0.lock();
            if skip_last_token {
                writer.skip_last_token();
            }
            writer.restore(&store)
        });
        restored.map_err(|error| errors::store(py, &error))
    }

    /// Commits the written rows: readers and other sequences with the same prefix see them. Raises BufferError while
    /// arrays made by ``rows`` exist; drop them and commit again.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        // Under the lock of `inner`: a new array needs it to get a reference.
        let mut arrays = 0;
        let taken = self.inner.take_if(|inner| {
            arrays = Arc::strong_count(&inner.guard) - 1;
            arrays == 0
        });
        let WriterInner { guard, cache } = match taken {
            Ok(Some(inner)) => inner,
            Ok(None) => {
                return Err(PyBufferError::new_err(format!(
                    "the memory is lent to {arrays} arrays, which could still be written; drop them, and commit again"
                )));
            }
            Err(reason) => return Err(closed(py, reason)),
        };
        let writer = match Arc::try_unwrap(guard) {
            Ok(guard) => guard.0.into_inner(),
            Err(_) => unreachable!("the only reference, checked under the lock"),
        };
        locked(py, &cache, |cache| cache.commit(writer)).map_err(|error| errors::blocks(py, &error))
    }

    /// Discards the uncommitted rows. Does nothing after a commit or another abort. The sequence remains busy until all
    /// arrays made by ``rows`` are dropped.
    fn abort(&self) {
        drop(self.inner.take());
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if !kind.is_none() {
            self.abort();
            return Ok(());
        }
        match self.inner.with(|_| ()) {
            // Committed or aborted inside the block.
            Err(Unusable::Closed) => Ok(()),
            _ => self.commit(py),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.with(py, |writer| writer.tokens()) {
            Ok(tokens) => {
                format!(
                    "<moontide.blocks.SequenceWriter of tokens {} to {} of {}>",
                    tokens.start, tokens.end, self.sequence
                )
            }
            Err(_) => "<moontide.blocks.SequenceWriter, closed>".to_owned(),
        }
    }
}
