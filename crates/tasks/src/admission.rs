//! [`Admission`]: which connections a listener keeps when there are too many of them.
//!
//! Three rules:
//!
//! - at most `connections_max` connections, of which at most half come from one address;
//! - a connection that has proven nothing gives way to a new one: first those that have not greeted, the oldest first, then
//!   those that have made no call;
//! - a connection that has made a call keeps its place until it is closed.
//!
//! So connections that only wait cannot keep others out, however many there are. The admission opens and closes no socket:
//! who holds a [`Place`] closes its connection when [`Evicted`] says so.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::sync::{Notify, oneshot};

/// Number of connections that one address may always have, within the limit of all: a host has several processes, and half
/// of a small limit would be too few for them.
const PER_ADDRESS_MIN: usize = 8;

/// Bytes of the requests of an address that a server is receiving or handling, for servers that limit them.
#[derive(Debug, Default)]
pub struct BodyBytes {
    /// Of requests that the server takes for small.
    pub small: AtomicUsize,
    /// Of the others.
    pub large: AtomicUsize,
}

/// Reason why a connection got no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its address has its share of the connections, and all of them have made calls.
    Address,
    /// There are as many connections as allowed, and all of them have made calls.
    Full,
}

/// The connections of a listener.
#[derive(Debug)]
pub struct Admission {
    connections_max: usize,
    per_address_max: usize,
    table: Mutex<Table>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Table {
    /// Number of the last connection.
    last: u64,
    open: usize,
    /// Addresses with connections.
    addresses: HashMap<IpAddr, Address>,
    /// Connections that have made no call, by number.
    unproven: BTreeMap<u64, Unproven>,
}

#[derive(Debug)]
struct Address {
    connections: usize,
    body_bytes: Arc<BodyBytes>,
}

#[derive(Debug)]
struct Unproven {
    address: IpAddr,
    has_greeted: bool,
    close: oneshot::Sender<()>,
}

impl Admission {
    /// Creates an admission without connections.
    pub fn new(connections_max: usize) -> Arc<Admission> {
        let per_address_max = (connections_max / 2).max(PER_ADDRESS_MIN).min(connections_max);
        Arc::new(Admission {
            connections_max,
            per_address_max,
            table: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Gives a place to a new connection from this address. If there is none left, another connection is evicted for it.
    pub fn admit(self: &Arc<Self>, peer: IpAddr) -> Result<(Place, Evicted), Refusal> {
        let address = network_of(peer);
        let mut table = self.table();
        let of_address = table.addresses.get(&address).map_or(0, |known| known.connections);
        let has_share = of_address >= self.per_address_max;
        let is_full = table.open >= self.connections_max;
        if has_share || is_full {
            let candidates =
                table.unproven.iter().filter(|(_, other)| !has_share || other.address == address);
            let victim = candidates.min_by_key(|(number, other)| (other.has_greeted, **number));
            let victim = victim.map(|(&number, _)| number);
            let Some(victim) = victim else {
                return Err(if is_full { Refusal::Full } else { Refusal::Address });
            };
            if let Some(victim) = table.unproven.remove(&victim) {
                // It may have been closed in the meantime.
                let _ = victim.close.send(());
            }
        }
        // An evicted connection is counted until it is closed: for a moment there is one more than allowed.
        table.open += 1;
        table.last += 1;
        let number = table.last;
        let known = table.addresses.entry(address);
        let known = known.or_insert_with(|| Address { connections: 0, body_bytes: Arc::default() });
        known.connections += 1;
        let body_bytes = Arc::clone(&known.body_bytes);
        let (close, closed) = oneshot::channel();
        table.unproven.insert(number, Unproven { address, has_greeted: false, close });
        drop(table);
        let is_proven = AtomicBool::new(false);
        let place = Place { admission: Arc::clone(self), number, address, body_bytes, is_proven };
        Ok((place, Evicted(Some(closed))))
    }

    /// Waits until a connection is closed. To be created before the refusal that it follows.
    pub fn freed(&self) -> impl Future<Output = ()> {
        self.freed.notified()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A thread that panics leaves the table as it is between two steps, which is harmless.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Place of one connection. Dropping it lets another connection have it.
#[derive(Debug)]
pub struct Place {
    admission: Arc<Admission>,
    number: u64,
    address: IpAddr,
    body_bytes: Arc<BodyBytes>,
    is_proven: AtomicBool,
}

impl Place {
    /// The connection has greeted: it gives way after those that have not.
    pub fn greeted(&self) {
        if let Some(own) = self.admission.table().unproven.get_mut(&self.number) {
            own.has_greeted = true;
        }
    }

    /// The connection has made a call: from now on it gives way to no other.
    pub fn proven(&self) {
        // Relaxed: no other data depends on it. Checked first, because it is called for every request.
        if !self.is_proven.load(Ordering::Relaxed) && !self.is_proven.swap(true, Ordering::Relaxed) {
            self.admission.table().unproven.remove(&self.number);
        }
    }

    /// Whether the connection has made a call.
    pub fn is_proven(&self) -> bool {
        self.is_proven.load(Ordering::Relaxed)
    }

    /// Bytes of the requests from its address.
    pub fn body_bytes_of_address(&self) -> &BodyBytes {
        &self.body_bytes
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.admission.table();
        table.open -= 1;
        table.unproven.remove(&self.number);
        if let Some(known) = table.addresses.get_mut(&self.address) {
            known.connections -= 1;
            if known.connections == 0 {
                table.addresses.remove(&self.address);
            }
        }
        drop(table);
        self.admission.freed.notify_one();
    }
}

/// Completes if the connection is to be closed in favour of another one.
#[derive(Debug)]
pub struct Evicted(Option<oneshot::Receiver<()>>);

impl Future for Evicted {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(close) = &mut self.0 else { return Poll::Pending };
        match Pin::new(close).poll(cx) {
            Poll::Ready(Ok(())) => Poll::Ready(()),
            // It has made a call.
            Poll::Ready(Err(_)) => {
                self.0 = None;
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Returns what counts as one address: a host usually has a whole IPv6 network of 64 bits.
fn network_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn is_evicted(evicted: &mut Evicted) -> bool {
        Pin::new(evicted).poll(&mut Context::from_waker(std::task::Waker::noop())).is_ready()
    }

    #[test]
    fn silent_connections_give_way_oldest_first() {
        let admission = Admission::new(64);
        let mut admitted: Vec<(Place, Evicted)> =
            (0..32).map(|_| admission.admit(address(1)).unwrap()).collect();
        admitted[0].0.greeted();
        let (_newer, _) = admission.admit(address(1)).unwrap();
        let evicted: Vec<bool> = admitted.iter_mut().map(|(_, evicted)| is_evicted(evicted)).collect();
        let expected: Vec<bool> = (0..32).map(|at| at == 1).collect();
        assert_eq!(evicted, expected, "the oldest one that has not greeted");
        admitted.remove(1);
        admitted.iter().for_each(|(place, _)| place.greeted());
        admitted[0].0.proven();
        // Those from the address whose share is used up, although others are free.
        let others: Vec<_> = (0..3).map(|_| admission.admit(address(1)).unwrap()).collect();
        assert!(!admitted.iter_mut().any(|(_, evicted)| is_evicted(evicted)), "silent ones go first");
        drop(others);
        admitted.iter().for_each(|(place, _)| place.proven());
        assert!(!admitted.iter_mut().any(|(_, evicted)| is_evicted(evicted)));
    }

    #[test]
    fn address_has_at_most_half_of_all_connections() {
        let admission = Admission::new(64);
        let proven = |last| {
            admission.admit(address(last)).map(|(place, _)| {
                place.proven();
                place
            })
        };
        let mut first: Vec<Place> = (0..32).map(|_| proven(1).unwrap()).collect();
        assert_eq!(proven(1).unwrap_err(), Refusal::Address);
        let second: Vec<Place> = (0..32).map(|_| proven(2).unwrap()).collect();
        assert_eq!(proven(3).unwrap_err(), Refusal::Full, "nothing gives way");
        first.pop();
        let third = proven(3).unwrap();
        assert_eq!(proven(2).unwrap_err(), Refusal::Full);
        drop((first, second, third));
        let table = admission.table();
        assert_eq!((table.open, table.addresses.len(), table.unproven.len()), (0, 0, 0));
    }

    #[test]
    fn small_limit_is_not_divided() {
        for max in [1, 2, 8] {
            let admission = Admission::new(max);
            let places: Vec<Place> = (0..max).map(|_| admission.admit(address(1)).unwrap().0).collect();
            places.iter().for_each(Place::proven);
            assert_eq!(admission.admit(address(1)).unwrap_err(), Refusal::Full);
        }
    }

    #[test]
    fn hosts_are_told_apart_by_network() {
        let network = |text: &str| network_of(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::ffff:1"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        assert_ne!(network("10.0.0.1"), network("10.0.0.2"));
    }
}
