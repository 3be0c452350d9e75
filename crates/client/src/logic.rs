//! Pure decisions of the client. No clock, socket or lock: time and randomness are arguments.
//!
//! | file | decision |
//! |---|---|
//! | `replicas` | order in which replicas are tried |
//! | `hedge` | delay before a second replica is read |
//! | `retry` | whether and when a call is retried |
//! | `location_cache` | which locations are cached |
//! | `routes` | which master is asked |

mod hedge;
mod location_cache;
mod replicas;
mod retry;
mod routes;

pub use hedge::HedgeTimer;
pub use location_cache::LocationCache;
pub use replicas::{Distance, NodeHealth, ReplicaCandidate, sort_replicas};
pub use retry::{Budget, RETRY_BACKOFF, RetryDecision, classify};
pub use routes::{GroupRoutes, is_misrouted, is_unanswered};
