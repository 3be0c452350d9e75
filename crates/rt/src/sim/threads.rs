//! Threads with the interface of [`std::thread`]: fibers if they are started in a world.

use std::io;
use std::panic::Location;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::world::{Key, World};

/// Settings of a new thread.
#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
    stack_bytes: Option<usize>,
}

impl Builder {
    /// Creates settings without a name.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Names the thread.
    #[must_use]
    pub fn name(self, name: String) -> Builder {
        Builder { name: Some(name), ..self }
    }

    /// Sets the size of the stack outside a world.
    #[must_use]
    pub fn stack_size(self, bytes: usize) -> Builder {
        Builder { stack_bytes: Some(bytes), ..self }
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// If the operating system gives no thread, or no stack.
    #[track_caller]
    pub fn spawn<F, T>(self, run: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let Some(world) = World::current() else {
            let mut builder = std::thread::Builder::new();
            if let Some(name) = self.name {
                builder = builder.name(name);
            }
            if let Some(bytes) = self.stack_bytes {
                builder = builder.stack_size(bytes);
            }
            let handle = builder.spawn(run)?;
            let thread = Thread(ThreadOf::System(handle.thread().clone()));
            return Ok(JoinHandle { inner: Join::System(handle), thread });
        };
        let result = Arc::new(Mutex::new(None));
        let slot = result.clone();
        let (fiber, name) = world.spawn(
            self.name,
            Box::new(move || {
                let value = run();
                *slot.lock().expect("no holder panics") = Some(value);
            }),
        )?;
        // Which of both runs first is open in each world.
        world.switch();
        let thread = Thread(ThreadOf::Fiber { fiber, name });
        Ok(JoinHandle { inner: Join::Fiber { fiber, result }, thread })
    }
}

/// Starts a thread.
///
/// # Panics
/// If the operating system gives no thread.
#[track_caller]
pub fn spawn<F, T>(run: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    Builder::new().spawn(run).expect("the operating system has a thread")
}

/// The right to wait for a thread.
#[derive(Debug)]
pub struct JoinHandle<T> {
    inner: Join<T>,
    thread: Thread,
}

#[derive(Debug)]
enum Join<T> {
    System(std::thread::JoinHandle<T>),
    Fiber { fiber: usize, result: Arc<Mutex<Option<T>>> },
}

impl<T> JoinHandle<T> {
    /// Waits for the end of the thread, and returns its result. In a world it has no error: a panic ends the run.
    ///
    /// # Errors
    /// If the thread panicked.
    ///
    /// # Panics
    /// If the handle of a fiber is used outside its world.
    #[track_caller]
    pub fn join(self) -> std::thread::Result<T> {
        match self.inner {
            Join::System(handle) => handle.join(),
            Join::Fiber { fiber, result } => {
                let world = World::current().expect("a fiber is joined in its world");
                let at = Location::caller();
                world.point(at);
                while !world.has_ended(fiber) {
                    world.wait(Some(Key::End(fiber)), None, "the end", Some(fiber), at);
                }
                let value = result.lock().expect("no holder panics").take();
                Ok(value.expect("a fiber that ends without a panic has a result"))
            }
        }
    }

    /// Whether the thread has ended.
    #[track_caller]
    pub fn is_finished(&self) -> bool {
        match &self.inner {
            Join::System(handle) => handle.is_finished(),
            Join::Fiber { fiber, .. } => {
                let world = World::current().expect("a fiber is observed in its world");
                world.point(Location::caller());
                world.has_ended(*fiber)
            }
        }
    }

    /// Returns the thread.
    pub fn thread(&self) -> &Thread {
        &self.thread
    }
}

/// A thread.
#[derive(Clone, Debug)]
pub struct Thread(ThreadOf);

#[derive(Clone, Debug)]
enum ThreadOf {
    System(std::thread::Thread),
    Fiber { fiber: usize, name: Arc<str> },
}

/// Number of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ThreadId(IdOf);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum IdOf {
    System(std::thread::ThreadId),
    Fiber(usize),
}

impl Thread {
    /// Returns its number.
    pub fn id(&self) -> ThreadId {
        ThreadId(match &self.0 {
            ThreadOf::System(thread) => IdOf::System(thread.id()),
            ThreadOf::Fiber { fiber, .. } => IdOf::Fiber(*fiber),
        })
    }

    /// Returns its name.
    pub fn name(&self) -> Option<&str> {
        match &self.0 {
            ThreadOf::System(thread) => thread.name(),
            ThreadOf::Fiber { name, .. } => Some(name),
        }
    }

    /// Ends the thread's [`park`], or its next one.
    ///
    /// # Panics
    /// If the thread is a fiber of a world that the caller is not in.
    pub fn unpark(&self) {
        match &self.0 {
            ThreadOf::System(thread) => thread.unpark(),
            ThreadOf::Fiber { fiber, .. } => {
                World::current().expect("a fiber is unparked in its world").unpark(*fiber);
            }
        }
    }
}

/// Returns the calling thread.
pub fn current() -> Thread {
    Thread(match World::current() {
        Some(world) => {
            let (fiber, name) = world.running_thread();
            ThreadOf::Fiber { fiber, name }
        }
        None => ThreadOf::System(std::thread::current()),
    })
}

/// Waits for a [`Thread::unpark`].
#[track_caller]
pub fn park() {
    match World::current() {
        Some(world) => world.park(None, Location::caller()),
        None => std::thread::park(),
    }
}

/// Waits for a [`Thread::unpark`], at most for `timeout`.
#[track_caller]
pub fn park_timeout(timeout: Duration) {
    match World::current() {
        Some(world) => {
            let until = world.after(timeout);
            world.park(Some(until), Location::caller());
        }
        None => std::thread::park_timeout(timeout),
    }
}

/// Waits for `duration`.
#[track_caller]
pub fn sleep(duration: Duration) {
    match World::current() {
        Some(world) => {
            let until = world.after(duration);
            world.wait(None, Some(until), "a time", None, Location::caller());
        }
        None => std::thread::sleep(duration),
    }
}

/// Lets other threads run.
pub fn yield_now() {
    match World::current() {
        Some(world) => world.yield_now(),
        None => std::thread::yield_now(),
    }
}
