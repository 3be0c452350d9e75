//! [`Fill`]: rows of a sequence that are being written.

use std::sync::Arc;

use moontide_blocks::Cache;
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange};

use super::cache::{Place, locked};
use super::rows::{Keeper, Rows};
use super::shape::Kind;
use crate::array::{Array, Source};
use crate::errors;
use crate::process::{Gone, OfProcess, gone};
use crate::store::{COPY_HELD_MAX, Store};

/// The right to write, which arrays share: it ends with the last of them.
#[derive(Debug)]
pub(crate) struct Filling(Mutex<moontide_blocks::Fill>);

/// The rows of a sequence's tokens that have none yet, to be written. ``with cache.fill(seq) as fill`` commits at the end of
/// the block, and gives up what was written if the block raises.
///
/// ``write`` copies arrays to where they belong. ``rows`` lends the memory itself: then all arrays must be gone before the
/// rows can be committed, so that nobody writes what others see. While there is a fill, the sequence may be appended to and
/// read, and nothing else.
///
/// >>> import numpy
/// >>> from moontide.blocks import BlockCache
/// >>> cache = BlockCache(layers=1, kv_heads=1, dim=2, dtype="float32", block_tokens=4, blocks=8)
/// >>> seq, shared = cache.allocate([1, 2, 3, 4, 5])
/// >>> with cache.fill(seq) as fill:
/// ...     fill.tokens
/// ...     fill.write("k", 0, numpy.ones((5, 1, 2), "float32"))
/// ...     for rows in fill.rows("v", 0):
/// ...         rows.numpy()[:] = 2.0
/// ...     del rows
/// ...     fill.complete()
/// range(0, 5)
/// >>> cache.filled(seq)
/// 5
#[pyclass(module = "moontide.blocks", frozen)]
#[derive(Debug)]
pub(crate) struct Fill {
    inside: OfProcess<Inside>,
    kind: Kind,
    sequence: u64,
    /// Where the arena is: what is copied out of it into itself is copied aside first.
    arena: std::ops::Range<usize>,
}

#[derive(Clone, Debug)]
struct Inside {
    filling: Arc<Filling>,
    cache: Arc<Mutex<Cache>>,
}

impl Fill {
    pub(crate) fn new(
        fill: moontide_blocks::Fill,
        cache: Arc<Mutex<Cache>>,
        kind: Kind,
        arena: std::ops::Range<usize>,
    ) -> Fill {
        let sequence = fill.id().to_bits();
        let filling = Arc::new(Filling(Mutex::new(fill)));
        Fill { inside: OfProcess::new(Inside { filling, cache }), kind, sequence, arena }
    }

    fn filling(&self, py: Python<'_>) -> PyResult<Arc<Filling>> {
        self.inside.with(|inside| Arc::clone(&inside.filling)).map_err(|why| over(py, why))
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut moontide_blocks::Fill) -> R + Send,
    ) -> PyResult<R> {
        let filling = self.filling(py)?;
        Ok(locked(py, &filling.0, call))
    }

    /// How many tokens an array is of, if it is of this cache's.
    fn tokens_of(&self, array: &Array) -> PyResult<usize> {
        let shape = self.kind.shape;
        let (per_token, plain) = (shape.heads() * shape.dim(), self.kind.plain_dtype());
        let is_of_kind = array.dtype == Some(self.kind.dtype) || array.dtype == Some(plain);
        let lengths = array.shape();
        let product = |lengths: &[u64]| lengths.iter().fold(1, |all: u64, len| all.saturating_mul(*len));
        match lengths.split_first() {
            Some((tokens, rest)) if is_of_kind && product(rest) == per_token as u64 => Ok(*tokens as usize),
            _ => Err(errors::argument(format!(
                "rows of this cache are arrays [tokens, {}, {}] of {}, not {lengths:?} of {}",
                shape.heads(),
                shape.dim(),
                self.kind.dtype.name(),
                array.dtype.map_or("another type", |dtype| dtype.name()),
            ))),
        }
    }
}

fn over(py: Python<'_>, why: Gone) -> PyErr {
    match why {
        Gone::Closed => errors::closed(py, "the fill is over: it was committed or abandoned".to_owned()),
        Gone::Forked => gone(py, "fill", why),
    }
}

#[pymethods]
impl Fill {
    /// Whose rows they are.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The tokens whose rows are still to be written, counted from the sequence's first.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        let tokens = self.with(py, |fill| fill.tokens())?;
        PyRange::new(py, tokens.start as isize, tokens.end as isize)
    }

    /// Copies an array ``[tokens, heads, dim]`` to where it belongs, beginning with the first token of ``tokens``.
    fn write(&self, py: Python<'_>, plane: &str, layer: u32, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let (plane, layer) = self.kind.place(plane, layer)?;
        let array = Array::of(array)?;
        let tokens = self.tokens_of(&array)?;
        let source = array.into_source(py)?;
        let address = source.bytes().as_ptr() as usize;
        let is_ours = address < self.arena.end && self.arena.start < address + source.bytes().len();
        // Rows may be copied onto themselves, which is not how bytes are copied.
        let source = if is_ours { Source::Collected(source.bytes().to_vec()) } else { source };
        let write = |fill: &mut moontide_blocks::Fill| {
            let left = fill.tokens().len();
            if tokens <= left {
                fill.write(plane, layer, source.bytes());
            }
            left
        };
        let left = match source.bytes().len() {
            ..=COPY_HELD_MAX => self.with(py, write)?,
            _ => {
                let filling = self.filling(py)?;
                py.detach(|| write(&mut filling.0.lock()))
            }
        };
        match tokens <= left {
            true => Ok(()),
            false => Err(errors::argument(format!("{tokens} tokens, and only {left} are to be written"))),
        }
    }

    /// The memory of the rows, one for each block, to be written. All arrays made from them must be gone before the rows
    /// can be committed.
    fn rows<'py>(&self, py: Python<'py>, plane: &str, layer: u32) -> PyResult<Bound<'py, PyList>> {
        let (plane, layer) = self.kind.place(plane, layer)?;
        let filling = self.filling(py)?;
        let parts = locked(py, &filling.0, |fill| {
            let (mut parts, tokens) = (Vec::new(), fill.tokens());
            let mut at = tokens.start;
            while at < tokens.end {
                let mut rows = fill.rows(plane, layer, at);
                let (start, token, head) = rows.parts();
                parts.push(Place::new(start, rows.tokens(), token, head));
                at += rows.tokens();
            }
            parts
        });
        let rows = parts.into_iter().map(|place| {
            let keeper = Keeper::Filling(Arc::clone(&filling));
            // SAFETY: rows of the fill, which only it writes and nobody sees, as long as it is not dropped.
            unsafe { Rows::new(keeper, &self.kind, place.address, &place.outer(&self.kind)) }
        });
        PyList::new(py, rows.map(|rows| Bound::new(py, rows)).collect::<PyResult<Vec<_>>>()?)
    }

    /// The rows of so many tokens more are complete, in all layers and planes; without a number, of all that are left.
    #[pyo3(signature = (tokens=None))]
    fn complete(&self, py: Python<'_>, tokens: Option<usize>) -> PyResult<()> {
        let left = self.with(py, |fill| {
            let left = fill.tokens().len();
            if tokens.is_none_or(|tokens| tokens <= left) {
                fill.complete(tokens.unwrap_or(left));
            }
            left
        })?;
        match tokens {
            Some(tokens) if tokens > left => {
                Err(errors::argument(format!("{tokens} tokens, and only {left} are to be written")))
            }
            _ => Ok(()),
        }
    }

    /// Brings from a store what it has of these rows, up to the first block that it does not have, without holding the
    /// cache up: how many tokens came, which are complete now. With ``leave_last`` the last token is never among them.
    #[pyo3(signature = (store, namespace, *, part="0", leave_last=true))]
    fn restore(
        &self,
        py: Python<'_>,
        store: &Bound<'_, Store>,
        namespace: &Bound<'_, PyAny>,
        part: &str,
        leave_last: bool,
    ) -> PyResult<usize> {
        let store = super::cache::block_store(py, store, namespace, part, None)?;
        let filling = self.filling(py)?;
        let restored = py.detach(|| {
            let mut fill = filling.0.lock();
            if leave_last {
                fill.leave_last();
            }
            fill.restore(&store)
        });
        restored.map_err(|error| errors::store(py, &error))
    }

    /// Makes what is complete visible, to readers and to other sequences with the same beginning. Raises BufferError while
    /// there are arrays made by ``rows``; drop them and try again.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        // Under the lock of `inside`, through which every array gets its share.
        let mut arrays = 0;
        let taken = self.inside.take_if(|inside| {
            arrays = Arc::strong_count(&inside.filling) - 1;
            arrays == 0
        });
        let Inside { filling, cache } = match taken {
            Ok(Some(inside)) => inside,
            Ok(None) => {
                return Err(PyBufferError::new_err(format!(
                    "the memory is lent to {arrays} arrays, which could still be written; drop them, and commit again"
                )));
            }
            Err(why) => return Err(over(py, why)),
        };
        let fill = match Arc::try_unwrap(filling) {
            Ok(filling) => filling.0.into_inner(),
            Err(_) => unreachable!("the only one, which was in nobody's hands"),
        };
        locked(py, &cache, |cache| cache.commit(fill)).map_err(|error| errors::blocks(py, &error))
    }

    /// Gives up what was written and not committed. A second time, or after a commit, it does nothing. The sequence can be
    /// filled again once all arrays made by ``rows`` are gone.
    fn abandon(&self) {
        drop(self.inside.take());
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
            self.abandon();
            return Ok(());
        }
        match self.inside.with(|_| ()) {
            // Over already.
            Err(Gone::Closed) => Ok(()),
            _ => self.commit(py),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.with(py, |fill| fill.tokens()) {
            Ok(tokens) => {
                format!("<moontide.blocks.Fill of {} to {} of {}>", tokens.start, tokens.end, self.sequence)
            }
            Err(_) => "<moontide.blocks.Fill, over>".to_owned(),
        }
    }
}
