//! Stress test: one heap, many processes, and a driver that kills them at random with `kill -9`.
//!
//! ```text
//!   driver (this test) ── SIGKILL, SIGSTOP, SIGCONT ──▶ writers, readers, reclaimer
//!        ▲  ▲                                                       │ requests: begin, commit, kill, reclaim
//!        │  └─────────────── one pipe: counters, wrong bytes ───────┤
//!        └── control socket: exited clients, final state ── owner ◀─┘
//! ```
//!
//! All of them are this binary, started again with a role. Checked, whatever is killed or stopped at any time: no
//! reader ever sees a wrong byte; everything that a dead process held is free within a second; at the end no slot,
//! unit, index entry, ledger, descriptor or mapping is left; and the bytes under the guards of a stopped process do
//! not change. A second test enables a mutation in the owner and requires that the stress test detects it.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_STRESS_KILLS` | number of kills [default: 220; 1000 for the long form] |
//! | `MOONTIDE_STRESS_MUTATION=forget-living` | enables the mutation in the first test, which then must fail |
//!
//! There is no libtest harness, because children must start without one.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

mod common;

#[path = "stress/clients.rs"]
mod clients;
#[path = "stress/driver.rs"]
mod driver;
#[path = "stress/owner.rs"]
mod owner;
#[path = "stress/payload.rs"]
mod payload;
#[path = "stress/wire.rs"]
mod wire;

use std::process::ExitCode;

use wire::Role;

const TESTS: [(&str, fn()); 2] = [
    ("killed_and_stopped_processes_cause_no_corruption_or_leak", driver::stress_passes),
    ("mutation_node_forgetting_living_client_is_detected", driver::mutation_is_detected),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(role) = Role::from_arguments(&arguments) {
        wire::exit_with_parent(role.parent());
        match role {
            Role::Owner { mutation, .. } => owner::run(mutation),
            Role::Client { kind, socket, seed, .. } => clients::run(kind, &socket, seed),
        }
    }
    common::libtest::run(&TESTS, &[], &arguments)
}
