//! A link for threads has no thread of its own. Alone in its file: other tests of a process have threads, too.

mod server;

use std::thread;

use moontide_client::{BlockingLink, LinkConfig};
use moontide_proto::convert::CallerId;
use moontide_types::{Key, Tenant};
use server::{Server, eventually};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("Linux").count()
}

#[test]
fn no_thread_is_left_behind() {
    let before = threads();
    {
        let server = Server::start();
        let port = server.address.rsplit(':').next().expect("a port").to_owned();
        let name = format!("localhost:{port}"); // resolving takes a thread, for a moment
        let link = BlockingLink::connect(LinkConfig::new(name, CallerId(1))).expect("the server listens");
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let key = Key::new(&[2]).expect("a key");
                        assert_eq!(link.exist_one(Tenant::DEFAULT, key).expect("an answer"), Ok(true));
                    }
                });
            }
        });
        // The server accepts on one thread and serves on another.
        eventually("none but the server's", || threads() == before + 2);
    }
    eventually("as many as before", || threads() == before);
}
