//! Tasks as threads of a world.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use moontide_rt::thread::{self, Thread};

/// Runs a future on the calling thread of a world.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        thread::park();
    }
}

/// Runs what a world does in a runtime whose choices of `select!` follow from a seed. Nothing drives the runtime. At the end the
/// network of the world is dropped: all its other processes must have ended, or be killed.
///
/// # Panics
/// If the operating system refuses what a runtime without threads needs.
pub fn with_runtime<T>(seed: u64, run: impl FnOnce() -> T) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let seed = tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes());
    let runtime = runtime.enable_time().rng_seed(seed).build().expect("a runtime without threads");
    // Without the budget of a task, after which futures of tokio would wait for the runtime.
    let value = runtime.block_on(tokio::task::unconstrained(async { run() }));
    super::rpc::end_network();
    runtime.shutdown_background();
    value
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A task that has failed: none, because a panic ends the world.
#[derive(Debug)]
pub struct JoinError(());

/// Result of a task, or who waits for it.
#[derive(Debug)]
struct Shared<T> {
    value: Option<T>,
    is_finished: bool,
    waker: Option<Waker>,
}

/// The right to wait for a task. The task goes on if it is dropped.
#[derive(Debug)]
pub struct JoinHandle<T>(Arc<Mutex<Shared<T>>>);

impl<T> JoinHandle<T> {
    /// Whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.0.lock().expect("no holder panics").is_finished
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T, JoinError>> {
        let mut shared = self.0.lock().expect("no holder panics");
        match shared.value.take() {
            Some(value) => Poll::Ready(Ok(value)),
            None => {
                shared.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

fn start<T: Send + 'static>(name: &str, run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let shared = Arc::new(Mutex::new(Shared { value: None, is_finished: false, waker: None }));
    let slot = Arc::clone(&shared);
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        let value = run();
        let waker = {
            let mut shared = slot.lock().expect("no holder panics");
            shared.value = Some(value);
            shared.is_finished = true;
            shared.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    });
    thread.expect("the operating system has a stack");
    JoinHandle(shared)
}

/// Starts a task.
///
/// # Panics
/// If the operating system gives no stack.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    start("moontide-task", move || block_on(future))
}

/// Runs a function that may wait.
///
/// # Panics
/// If the operating system gives no stack.
pub fn spawn_blocking<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    start("moontide-blocking", run)
}
