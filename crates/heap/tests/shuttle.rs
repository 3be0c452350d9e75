//! Shuttle.
#![cfg(shuttle)]
