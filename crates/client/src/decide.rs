//! What the client decides, without a clock, a socket or a lock: time and randomness are arguments.
//!
//! | file | decides |
//! |---|---|
//! | `replicas` | in which order replicas are asked |
//! | `hedge` | when a second one is asked beside a slow first one |
//! | `retry` | whether and when a call is tried again |
//! | `locations` | which places are remembered |
//! | `routes` | which master is asked |

mod hedge;
mod locations;
mod replicas;
mod retry;
mod routes;

pub use hedge::HedgeTimer;
pub use locations::Locations;
pub use replicas::{Candidate, Nearness, Trust, order};
pub use retry::{Backoff, Budget, Verdict, judge};
pub use routes::{Routes, is_misrouted};
