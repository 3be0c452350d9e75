//! [`Departures`]: what has left the store, for Python.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_client::Departure;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::seconds;
use crate::process::{OfProcess, gone};

/// A wait is cut into pieces of this length, between which Python may handle signals.
const PIECE: Duration = Duration::from_millis(500);

/// No sum of times overflows.
const FOR_EVER: Duration = Duration::from_secs(365 * 86_400);

/// What has left the store, of all tenants: objects that were removed or evicted, have expired, or were lost with a node.
///
/// >>> import time
/// >>> store.put("leaves", b"...")
/// True
/// >>> feed = store.departures()
/// >>> feed.next(10)  # nothing is known of the time before
/// ([], True)
/// >>> store.remove("leaves")
/// True
/// >>> ids, gap = feed.next(10)
/// >>> store.object_id("leaves") in ids, gap
/// (True, False)
/// >>> feed.close()
///
/// Made by Store.departures(). One thread at a time waits in it; a second one waits for the first.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct Departures {
    held: OfProcess<Arc<Mutex<moontide_client::Departures>>>,
}

impl Departures {
    pub(crate) fn new(departures: moontide_client::Departures) -> Departures {
        Departures { held: OfProcess::new(Arc::new(Mutex::new(departures))) }
    }
}

/// Ids, and whether there is a gap.
type News<'py> = (Vec<Bound<'py, PyBytes>>, bool);

#[pymethods]
impl Departures {
    /// The next news, or None if there are none within timeout seconds: the ids of objects that have left (see
    /// Store.object_id), and whether there is a gap. After a gap something may have left that is in no list, so that
    /// whoever cares has to look by itself. Says nothing about a store that is away: it goes on when that is back.
    #[pyo3(signature = (timeout=1.0))]
    fn next<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Option<News<'py>>> {
        let until = Instant::now() + seconds("timeout", timeout)?.min(FOR_EVER);
        loop {
            let held = self.held.with(Arc::clone).map_err(|why| gone(py, "feed", why))?;
            let piece = until.saturating_duration_since(Instant::now()).min(PIECE);
            let news = py.detach(|| held.lock().next(piece));
            if let Some(news) = news {
                let gap = news.contains(&Departure::Gap);
                let ids = news.iter().filter_map(|departure| match departure {
                    Departure::Gone(id) => Some(PyBytes::new(py, &id.0)),
                    Departure::Gap => None,
                });
                return Ok(Some((ids.collect(), gap)));
            }
            py.check_signals()?;
            if Instant::now() >= until {
                return Ok(None);
            }
        }
    }

    /// Asks no more. A second time it does nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(held) = self.held.take() {
            py.detach(|| drop(held));
        }
    }
}
