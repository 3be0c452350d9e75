//! Logging, panic handling and signals of the commands that run until a signal stops them.

use std::io::IsTerminal;

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;
use tracing_subscriber::EnvFilter;

/// Environment variable with the log filter, e.g. `info` or `moontide_master=debug,info`.
const LOG_VARIABLE: &str = "MOONTIDE_LOG";
/// Default log filter of a server.
pub(crate) const LOG_SERVER: &str = "info";
/// Default log filter of a terminal command, which prints its own output.
pub(crate) const LOG_TERMINAL: &str = "error";
/// Default log filter of `moontide dev`. It drops the server's warnings about missing persistence, which is intended
/// there.
pub(crate) const LOG_DEV: &str = "warn,moontide_master::server=error";

/// Starts logging to standard error. The running command calls it once.
pub(crate) fn log_to_stderr(default: &str) {
    let filter = std::env::var(LOG_VARIABLE).unwrap_or_else(|_| default.to_owned());
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|error| {
        eprintln!("moontide: {LOG_VARIABLE} is invalid ({error}); using {default}");
        EnvFilter::new(default)
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Aborts the process on a panic. A panic is a bug and may leave a change half done. The nodes' headers are
/// authoritative: a restart rebuilds from them, which is safer than continuing.
pub(crate) fn abort_on_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        std::process::abort();
    }));
}

/// Handlers of SIGTERM and SIGINT, active from creation.
///
/// Created before anything is started, so that a signal during the start is not lost.
pub(crate) struct Signals {
    runtime: Runtime,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Installs the handlers.
    pub(crate) fn catch() -> std::io::Result<Signals> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (terminate, interrupt) = {
            let _entered = runtime.enter();
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
        };
        Ok(Signals { runtime, terminate, interrupt })
    }

    /// Waits for the next signal.
    pub(crate) fn wait(&mut self) {
        let name = self.runtime.block_on(async {
            tokio::select! {
                _ = self.terminate.recv() => "SIGTERM",
                _ = self.interrupt.recv() => "SIGINT",
            }
        });
        info!(signal = name, "signal received; stopping");
    }
}
