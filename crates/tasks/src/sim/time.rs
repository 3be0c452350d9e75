//! Timers of tasks, on the clock of the running process. The names are those of tokio, as far as they are used.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use moontide_rt::sim::WakeTimer;
use moontide_rt::time::Instant;

/// Waits for a time.
#[derive(Debug)]
#[must_use]
pub struct Sleep {
    until: Instant,
    /// Wakes this waker then.
    timer: Option<(Waker, WakeTimer)>,
}

impl Sleep {
    fn until(until: Instant) -> Sleep {
        Sleep { until, timer: None }
    }
}

/// Waits for `duration`.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep::until(Instant::now() + duration)
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.until {
            return Poll::Ready(());
        }
        let waker = context.waker();
        if self.timer.as_ref().is_none_or(|(set, _)| !set.will_wake(waker)) {
            let timer = WakeTimer::new(self.until, waker.clone());
            self.timer = Some((waker.clone(), timer.expect("tasks run within a world")));
        }
        Poll::Pending
    }
}

/// The time was over before the future was ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed(());

/// Waits for a future, at most for `duration`.
///
/// # Errors
/// If the time is over.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, Elapsed> {
    let (mut future, mut over) = (pin!(future), pin!(sleep(duration)));
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Ok(value)),
        Poll::Pending => over.as_mut().poll(context).map(|()| Err(Elapsed(()))),
    })
    .await
}

/// What happens to ticks that were missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissedTickBehavior {
    /// The next tick is one period after the late one.
    Delay,
}

/// Ticks. The first tick is at once.
#[derive(Debug)]
pub struct Interval {
    period: Duration,
    next: Sleep,
}

/// Creates an interval.
pub fn interval(period: Duration) -> Interval {
    Interval { period, next: Sleep::until(Instant::now()) }
}

impl Interval {
    /// Waits for the next tick.
    pub async fn tick(&mut self) -> Instant {
        Pin::new(&mut self.next).await;
        let now = Instant::now();
        self.next = Sleep::until(now + self.period);
        now
    }

    /// Moves the next tick to one period from now.
    pub fn reset(&mut self) {
        self.next = Sleep::until(Instant::now() + self.period);
    }

    /// Sets what happens to ticks that were missed; there is one choice.
    pub fn set_missed_tick_behavior(&mut self, _: MissedTickBehavior) {}
}
