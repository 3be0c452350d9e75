//! [`Invalidations`]: the feed of invalidated objects, for Python.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_client::Invalidation;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::seconds;
use crate::process::{ProcessLocal, unusable_error};

/// Interval at which a wait lets Python handle signals.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Longest wait; sums with it do not overflow.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// Feed of invalidated objects of the tenant: objects that were removed, evicted, expired, or lost with a node.
///
/// >>> store.put("leaves", b"...")
/// True
/// >>> feed = store.invalidations()
/// >>> feed.next(10)  # the first result is a gap: earlier invalidations are unknown
/// ([], True)
/// >>> store.remove("leaves")
/// True
/// >>> ids, gap = feed.next(10)
/// >>> store.object_id("leaves") in ids, gap
/// (True, False)
/// >>> feed.close()
///
/// Created by Store.invalidations(). One thread at a time waits in next(); other threads wait for it.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct Invalidations {
    feed: ProcessLocal<Arc<Mutex<moontide_client::Invalidations>>>,
}

impl Invalidations {
    pub(crate) fn new(feed: moontide_client::Invalidations) -> Invalidations {
        Invalidations { feed: ProcessLocal::new(Arc::new(Mutex::new(feed))) }
    }
}

/// Ids, and whether there is a gap.
type IdsAndGap<'py> = (Vec<Bound<'py, PyBytes>>, bool);

#[pymethods]
impl Invalidations {
    /// Returns the ids of invalidated objects (see Store.object_id) and whether there is a gap, or None if there are no
    /// invalidations within timeout seconds. After a gap, invalidations may be missing from the lists, and the caller
    /// must check its keys again. While the store is unavailable the call returns None; the feed continues afterwards.
    #[pyo3(signature = (timeout=1.0))]
    fn next<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Option<IdsAndGap<'py>>> {
        let deadline = Instant::now() + seconds("timeout", timeout)?.min(TIMEOUT_MAX);
        loop {
            let feed = self.feed.with(Arc::clone).map_err(|reason| unusable_error(py, "feed", reason))?;
            let wait = deadline.saturating_duration_since(Instant::now()).min(SIGNAL_POLL_INTERVAL);
            let received = py.detach(|| feed.lock().next(wait));
            if let Some(invalidations) = received {
                let gap = invalidations.contains(&Invalidation::Gap);
                let ids = invalidations.iter().filter_map(|invalidation| match invalidation {
                    Invalidation::Removed(id) => Some(PyBytes::new(py, &id.0)),
                    Invalidation::Gap => None,
                });
                return Ok(Some((ids.collect(), gap)));
            }
            py.check_signals()?;
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    /// Ends the feed. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(feed) = self.feed.take() {
            py.detach(|| drop(feed));
        }
    }
}
