//! What the commands that run until they are told to stop share: the log, panics, signals.

use std::io::IsTerminal;

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;
use tracing_subscriber::EnvFilter;

/// Names what is logged, as `info` or `moontide_master=debug,info`.
const LOG_VARIABLE: &str = "MOONTIDE_LOG";
/// What a server logs unless told otherwise.
pub(crate) const LOG_SERVER: &str = "info";
/// What a command at a terminal logs unless told otherwise: its own words are enough.
pub(crate) const LOG_TERMINAL: &str = "error";
/// The same for a cluster to try things out, which forgets everything and is meant to.
pub(crate) const LOG_DEV: &str = "warn,moontide_master::server=error";

/// Logs to standard error. Called once, by the command that runs.
pub(crate) fn log_to_stderr(default: &str) {
    let filter = std::env::var(LOG_VARIABLE).unwrap_or_else(|_| default.to_owned());
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|error| {
        eprintln!("moontide: {LOG_VARIABLE} is wrong ({error}); logging {default}");
        EnvFilter::new(default)
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// A panic is a bug, and may leave half a change behind. The nodes' headers are the truth: a new start rebuilds from
/// them, which is better than going on.
pub(crate) fn abort_on_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        std::process::abort();
    }));
}

/// The signals that ask a process to end, caught from the moment this exists.
///
/// Made before anything is started: a signal that comes meanwhile is not lost.
pub(crate) struct Signals {
    runtime: Runtime,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Catches them.
    pub(crate) fn catch() -> std::io::Result<Signals> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (terminate, interrupt) = {
            let _entered = runtime.enter();
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
        };
        Ok(Signals { runtime, terminate, interrupt })
    }

    /// Waits for one of them.
    pub(crate) fn wait(mut self) {
        let name = self.runtime.block_on(async {
            tokio::select! {
                _ = self.terminate.recv() => "SIGTERM",
                _ = self.interrupt.recv() => "SIGINT",
            }
        });
        info!(signal = name, "told to stop");
    }
}
