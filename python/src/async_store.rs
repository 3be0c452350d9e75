//! [`AsyncStore`]: the asyncio client.
//!
//! Calls of several tasks with one key each share requests. Separate threads copy bytes. A call holds all its arguments
//! until it ends, even if its task is cancelled.

use std::future::Future;

use bytes::Bytes;
use moontide_client::StoreError;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{Keys, PutOptions, key, pin_class, put_options, same_length};
use crate::array::{Source, Target};
use crate::errors;
use crate::loop_queue::{LoopQueue, running_loop, runtime};
use crate::process::{ProcessLocal, unusable_error};
use crate::store::{
    UninitBytes, batch_bytes, config, get_batch_into_parts, get_into_parts, get_refs, stats_of, targets,
    tensor_parts, was_stored,
};
use crate::tensor::Tensor;
use crate::view::View;

/// Connection to a cluster for asyncio. Calls return awaitables.
///
/// >>> import asyncio
/// >>> async def main():
/// ...     async with await moontide.AsyncStore.connect(dev.master) as store:
/// ...         await store.put("async", b"tides")
/// ...         return await store.get("async")
/// >>> asyncio.run(main())
/// b'tides'
#[pyclass(module = "moontide", frozen)]
#[derive(Debug)]
pub(crate) struct AsyncStore {
    held: ProcessLocal<moontide_client::AsyncStore>,
    /// One queue per event loop. No Python code runs while this is locked: another thread could hold the GIL and wait
    /// for this lock.
    queues: Mutex<Vec<Py<LoopQueue>>>,
    master: String,
}

impl Drop for AsyncStore {
    fn drop(&mut self) {
        let queues = std::mem::take(self.queues.get_mut());
        Python::try_attach(|py| queues.iter().for_each(|queue| queue.get().close(py)));
    }
}

type Awaitable<'py> = PyResult<Bound<'py, PyAny>>;

impl AsyncStore {
    fn client(&self, py: Python<'_>) -> PyResult<moontide_client::AsyncStore> {
        self.held.with(Clone::clone).map_err(|reason| unusable_error(py, "store", reason))
    }

    /// Returns the queue of the event loop that runs on this thread.
    fn queue(&self, py: Python<'_>) -> PyResult<Py<LoopQueue>> {
        let event_loop = running_loop(py)?;
        let known = self
            .queues
            .lock()
            .iter()
            .find(|known| known.get().is_of(&event_loop))
            .map(|known| known.clone_ref(py));
        if let Some(known) = known {
            return Ok(known);
        }
        let made = LoopQueue::new(py, &event_loop)?;
        made.get().keep_alive();
        let all: Vec<_> = self.queues.lock().iter().map(|known| known.clone_ref(py)).collect();
        let orphaned: Vec<_> = all.iter().filter(|known| known.get().is_orphaned(py)).collect();
        let mut queues = self.queues.lock();
        // `all` also holds the removed queues, so no Python object is dropped under the lock.
        queues.retain(|known| !orphaned.iter().any(|orphan| orphan.is(known)));
        queues.push(made.clone_ref(py));
        drop(queues);
        Ok(made)
    }

    /// Runs a call of the client. `convert` makes the value of the awaitable from the result.
    fn call<'py, R, T, F>(
        &self,
        py: Python<'py>,
        call: impl FnOnce(moontide_client::AsyncStore) -> F,
        convert: impl FnOnce(Python<'_>, R) -> PyResult<T> + Send + 'static,
    ) -> Awaitable<'py>
    where
        F: Future<Output = Result<R, StoreError>> + Send + 'static,
        R: Send + 'static,
        T: for<'a> IntoPyObject<'a>,
    {
        let client = self.client(py)?;
        let queue = self.queue(py)?;
        queue.get().spawn(py, call(client), convert)
    }

    /// Runs a blocking call on a thread for blocking work.
    fn on_thread<'py, R, T>(
        &self,
        py: Python<'py>,
        work: impl FnOnce(&moontide_client::Store) -> Result<R, StoreError> + Send + 'static,
        convert: impl FnOnce(Python<'_>, R) -> PyResult<T> + Send + 'static,
    ) -> Awaitable<'py>
    where
        R: Send + 'static,
        T: for<'a> IntoPyObject<'a>,
    {
        self.call(py, |client| async move { client.run_blocking(work).await? }, convert)
    }
}

fn plain<T>(_py: Python<'_>, value: T) -> PyResult<T> {
    Ok(value)
}

fn bytes_of(py: Python<'_>, bytes: Option<Bytes>) -> PyResult<Option<Py<PyBytes>>> {
    bytes.map(|bytes| UninitBytes::copy(py, &bytes).map(Bound::unbind)).transpose()
}

/// Returns a key that outlives the arguments of the call.
fn owned(key: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    self::key(key).map(Bytes::copy_from_slice)
}

fn all_owned(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Bytes>> {
    Ok(Keys::of(keys)?.bytes()?.into_iter().map(Bytes::copy_from_slice).collect())
}

fn borrowed(keys: &[Bytes]) -> Vec<&[u8]> {
    keys.iter().map(|key| &key[..]).collect()
}

/// Memory of a Python object, as the owner of a `Bytes`.
struct PyBuffer(Source);

impl AsRef<[u8]> for PyBuffer {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn value(value: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    Ok(Bytes::from_owner(PyBuffer(Source::of(value)?)))
}

#[pymethods]
impl AsyncStore {
    /// Connects. Raises Unreachable within `connect_timeout` seconds if no master answers.
    #[staticmethod]
    #[pyo3(signature = (master=None, **settings))]
    fn connect<'py>(
        py: Python<'py>,
        master: Option<&str>,
        settings: Option<&Bound<'py, PyDict>>,
    ) -> Awaitable<'py> {
        let config = config(master, settings)?;
        let master = config.master.clone();
        let connecting = moontide_client::AsyncStore::connect(config);
        let queue = LoopQueue::new(py, &running_loop(py)?)?;
        let kept = queue.clone_ref(py);
        queue.get().spawn(py, connecting, move |_, client| {
            kept.get().keep_alive();
            let queues = Mutex::new(vec![kept]);
            Ok(AsyncStore { held: ProcessLocal::new(client), queues, master })
        })
    }

    /// Address of the master.
    #[getter]
    fn master(&self) -> &str {
        &self.master
    }

    /// Closes the connection after the running calls. Views remain valid. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(client) = self.held.take() {
            let queues = std::mem::take(&mut *self.queues.lock());
            queues.iter().for_each(|queue| queue.get().close(py));
            // The drop of the last reference can wait for threads, so it does not run on the loop's thread.
            if let Ok(runtime) = runtime(py) {
                runtime.spawn_blocking(move || drop(client));
            }
        }
    }

    /// Whether the store is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.held.with(|_| ()).is_err()
    }

    fn __aenter__<'py>(slf: Bound<'py, Self>) -> Awaitable<'py> {
        LoopQueue::done(slf.py(), slf.into_any().unbind())
    }

    fn __aexit__<'py>(
        &self,
        py: Python<'py>,
        _kind: &Bound<'py, PyAny>,
        _value: &Bound<'py, PyAny>,
        _trace: &Bound<'py, PyAny>,
    ) -> Awaitable<'py> {
        self.close(py);
        LoopQueue::done(py, py.None())
    }

    /// As Store.put. The value must not change until the call ends.
    #[pyo3(signature = (key, value, options=None, **named))]
    fn put<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PutOptions>>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> Awaitable<'py> {
        let options = put_options(py, options, named)?;
        let (key, value) = (owned(key)?, self::value(value)?);
        let call =
            |client: moontide_client::AsyncStore| async move { client.put(&key, value, &options).await };
        self.call(py, call, |_, outcome| Ok(was_stored(outcome)))
    }

    /// As Store.put_from.
    #[pyo3(signature = (key, parts, options=None, **named))]
    fn put_from<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        parts: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PutOptions>>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> Awaitable<'py> {
        let options = put_options(py, options, named)?;
        let key = owned(key)?;
        let sources: Vec<Source> =
            parts.try_iter()?.map(|part| Source::of(&part?)).collect::<PyResult<_>>()?;
        let work = move |client: &moontide_client::Store| {
            let parts: Vec<&[u8]> = sources.iter().map(Source::bytes).collect();
            client.put_with(&key, &parts, &options)
        };
        self.on_thread(py, work, |_, put| Ok(was_stored(put)))
    }

    /// As Store.put_tensor.
    #[pyo3(signature = (key, array, options=None, **named))]
    fn put_tensor<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        array: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PutOptions>>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> Awaitable<'py> {
        let options = put_options(py, options, named)?;
        let (key, (header, source)) = (owned(key)?, tensor_parts(py, array)?);
        let work = move |client: &moontide_client::Store| {
            client.put_with(&key, &[&header[..], source.bytes()], &options)
        };
        self.on_thread(py, work, |_, put| Ok(was_stored(put)))
    }

    /// As Store.batch_put.
    #[pyo3(signature = (keys, values, options=None, **named))]
    fn batch_put<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PutOptions>>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> Awaitable<'py> {
        let options = put_options(py, options, named)?;
        let keys = all_owned(keys)?;
        let values: Vec<Bytes> = values.try_iter()?.map(|v| value(&v?)).collect::<PyResult<_>>()?;
        same_length(keys.len(), values.len(), "values")?;
        let items = keys.into_iter().zip(values).collect();
        let call =
            |client: moontide_client::AsyncStore| async move { client.put_batch(items, &options).await };
        self.call(py, call, |py, outcomes| {
            let stored = outcomes.into_iter().map(|outcome| outcome.map(was_stored));
            Ok(errors::batch(py, stored.collect())?.unbind())
        })
    }

    /// As Store.get.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let key = owned(key)?;
        self.call(py, |client| async move { client.get(&key).await }, bytes_of)
    }

    /// As Store.batch_get.
    fn batch_get<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        self.call(
            py,
            |client| async move { client.get_batch(keys).await },
            |py, outcomes| Ok(batch_bytes(py, outcomes)?.unbind()),
        )
    }

    /// As Store.get_view.
    fn get_view<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let key = owned(key)?;
        self.call(py, |client| async move { client.get_ref(&key).await }, |_, found| Ok(found.map(View::new)))
    }

    /// As Store.batch_get_view.
    fn batch_get_view<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        let work = move |client: &moontide_client::Store| Ok(get_refs(client, &borrowed(&keys)));
        self.on_thread(py, work, |py, outcomes| {
            let views = outcomes.into_iter().map(|outcome| Ok(outcome?.map(View::new)));
            Ok(errors::batch(py, views.collect())?.unbind())
        })
    }

    /// As Store.get_tensor.
    fn get_tensor<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let key = owned(key)?;
        self.call(py, |client| async move { client.get_ref(&key).await }, Tensor::of)
    }

    /// As Store.get_into. The memory must not be used until the call ends, even if the task is cancelled.
    fn get_into<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        into: &Bound<'py, PyAny>,
    ) -> Awaitable<'py> {
        let (key, mut into) = (owned(key)?, targets(into)?);
        let work = move |client: &moontide_client::Store| {
            let mut spaces: Vec<&mut [u8]> = into.iter_mut().map(Target::bytes).collect();
            get_into_parts(client, &key, &mut spaces)
        };
        self.on_thread(py, work, plain)
    }

    /// As Store.batch_get_into.
    fn batch_get_into<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        into: &Bound<'py, PyAny>,
    ) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        let mut all: Vec<Vec<Target>> =
            into.try_iter()?.map(|into| targets(&into?)).collect::<PyResult<_>>()?;
        same_length(keys.len(), all.len(), "buffers")?;
        let work = move |client: &moontide_client::Store| {
            let mut spaces: Vec<Vec<&mut [u8]>> =
                all.iter_mut().map(|targets| targets.iter_mut().map(Target::bytes).collect()).collect();
            Ok(get_batch_into_parts(client, &borrowed(&keys), &mut spaces))
        };
        self.on_thread(py, work, |py, outcomes| Ok(errors::batch(py, outcomes)?.unbind()))
    }

    /// As Store.exists.
    fn exists<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let key = owned(key)?;
        self.call(py, |client| async move { client.exists(&key).await }, plain)
    }

    /// As Store.batch_exists.
    fn batch_exists<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        let work = move |client: &moontide_client::Store| Ok(client.exists_batch(&borrowed(&keys)));
        self.on_thread(py, work, |py, outcomes| Ok(errors::batch(py, outcomes)?.unbind()))
    }

    /// As Store.remove.
    #[pyo3(signature = (key, force=false))]
    fn remove<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>, force: bool) -> Awaitable<'py> {
        let key = owned(key)?;
        self.call(py, |client| async move { client.remove(&key, force).await }, plain)
    }

    /// As Store.batch_remove.
    #[pyo3(signature = (keys, force=false))]
    fn batch_remove<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>, force: bool) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        let work = move |client: &moontide_client::Store| Ok(client.remove_batch(&borrowed(&keys), force));
        self.on_thread(py, work, |py, outcomes| Ok(errors::batch(py, outcomes)?.unbind()))
    }

    /// As Store.remove_all.
    #[pyo3(signature = (force=false))]
    fn remove_all<'py>(&self, py: Python<'py>, force: bool) -> Awaitable<'py> {
        self.on_thread(py, move |client| Ok(client.remove_all(force)?.removed), plain)
    }

    /// As Store.remove_by_prefix.
    #[pyo3(signature = (prefix, force=false))]
    fn remove_by_prefix<'py>(
        &self,
        py: Python<'py>,
        prefix: &Bound<'py, PyAny>,
        force: bool,
    ) -> Awaitable<'py> {
        let prefix = owned(prefix)?;
        self.on_thread(py, move |client| Ok(client.remove_by_prefix(&prefix, force)?.removed), plain)
    }

    /// As Store.remove_by_regex.
    #[pyo3(signature = (pattern, force=false))]
    fn remove_by_regex<'py>(&self, py: Python<'py>, pattern: String, force: bool) -> Awaitable<'py> {
        self.on_thread(py, move |client| Ok(client.remove_by_regex(&pattern, force)?.removed), plain)
    }

    /// As Store.stats. Returns the dict itself, not an awaitable.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_of(py, self.client(py)?.blocking())
    }

    /// As Store.touch.
    fn touch<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let keys = vec![owned(key)?];
        let touch = |client: moontide_client::AsyncStore| async move {
            client.touch(keys).await?.pop().expect("one result per key")
        };
        self.call(py, touch, plain)
    }

    /// As Store.batch_touch.
    fn batch_touch<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        let done = |py: Python<'_>, outcomes| Ok(errors::batch(py, outcomes)?.unbind());
        self.call(py, |client| async move { client.touch(keys).await }, done)
    }

    /// As Store.set_pin.
    fn set_pin<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>, pin: &str) -> Awaitable<'py> {
        let (keys, pin) = (vec![owned(key)?], pin_class(pin)?);
        let set = move |client: moontide_client::AsyncStore| async move {
            client.set_pin(keys, pin).await?.pop().expect("one result per key")
        };
        self.call(py, set, plain)
    }

    /// As Store.batch_set_pin.
    fn batch_set_pin<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>, pin: &str) -> Awaitable<'py> {
        let (keys, pin) = (all_owned(keys)?, pin_class(pin)?);
        let done = |py: Python<'_>, outcomes| Ok(errors::batch(py, outcomes)?.unbind());
        self.call(py, move |client| async move { client.set_pin(keys, pin).await }, done)
    }

    /// As Store.prefetch.
    fn prefetch<'py>(&self, py: Python<'py>, keys: &Bound<'py, PyAny>) -> Awaitable<'py> {
        let keys = all_owned(keys)?;
        let done = |py: Python<'_>, outcomes| Ok(errors::batch(py, outcomes)?.unbind());
        self.call(py, |client| async move { client.prefetch(keys).await }, done)
    }
}
