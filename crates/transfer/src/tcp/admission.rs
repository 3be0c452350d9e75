//! Which connections a server accepts, and which ones make room for others. Pure.
//!
//! | limit | a new connection over it |
//! |---|---|
//! | connections of one host, or of one local process | replaces its oldest one without a handshake, or is refused |
//! | connections of the server | replaces the oldest one without a handshake, or is refused |
//!
//! So silent connections lock no peer out, and one host leaves room for others.

use std::net::{IpAddr, Ipv6Addr};

use crate::error::PeerName;

/// Connections that are being closed to make room, and whose threads have not ended yet; above this, new ones are refused.
const CLOSING_MAX: usize = 64;

/// Who opened a connection, as far as limits distinguish peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// An IP address; of an IPv6 address the first 64 bits, within which a host chooses its addresses freely.
    Host(IpAddr),
    /// A process of this host, by its id.
    Process(u32),
}

impl Origin {
    pub(crate) fn of(peer: PeerName) -> Origin {
        match peer {
            PeerName::Local(pid) => Origin::Process(pid),
            PeerName::Tcp(address) => Origin::Host(match address.ip().to_canonical() {
                IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
                address => address,
            }),
        }
    }
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The handshake is not complete.
    Handshake,
    Established,
    /// It makes room for another; its thread is about to end.
    Closing,
}

/// What happens with a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Accept,
    /// The connection at this index, which has not finished its handshake, is closed.
    Replace(usize),
    /// The limit is reached.
    Refuse(&'static str),
}

/// Decides on a new connection. `open` are the others, the oldest first.
pub(crate) fn admit(
    open: impl Iterator<Item = (Origin, Phase)> + Clone,
    origin: Origin,
    (all_max, per_origin_max): (usize, usize),
) -> Admission {
    let silent = |of: Option<Origin>| {
        let mut open = open.clone();
        open.position(|(o, phase)| phase == Phase::Handshake && of.is_none_or(|of| of == o))
    };
    let is_live = |phase| phase != Phase::Closing;
    let (mut live, mut of_origin, mut closing) = (0, 0, 0);
    for (other, phase) in open.clone() {
        live += usize::from(is_live(phase));
        closing += usize::from(!is_live(phase));
        of_origin += usize::from(is_live(phase) && other == origin);
    }
    let (found, limit) = if of_origin >= per_origin_max {
        (silent(Some(origin)), "too many connections of this host or process")
    } else if live >= all_max {
        (silent(None), "too many connections")
    } else {
        return Admission::Accept;
    };
    found.filter(|_| closing < CLOSING_MAX).map_or(Admission::Refuse(limit), Admission::Replace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(last: u8) -> Origin {
        Origin::of(PeerName::Tcp(([10, 0, 0, last], 5000).into()))
    }

    #[test]
    fn new_connection_replaces_oldest_silent_one_at_a_limit() {
        use Phase::{Closing, Established, Handshake};
        let decide = |open: &[(Origin, Phase)], origin| admit(open.iter().copied(), origin, (4, 3));
        let (a, b, c) = (host(1), host(2), host(3));
        assert_eq!(decide(&[(a, Established), (a, Established)], a), Admission::Accept);
        let full_host = [(a, Established), (b, Handshake), (a, Handshake), (a, Handshake)];
        assert_eq!(decide(&full_host, a), Admission::Replace(2), "the oldest of the same host");
        assert_eq!(decide(&full_host, c), Admission::Replace(1), "the oldest of all");
        assert!(matches!(decide(&[(a, Established); 3], a), Admission::Refuse(_)), "no other gives way");
        assert_eq!(decide(&[(a, Established); 3], b), Admission::Accept);
        let all = [(a, Established), (a, Established), (b, Established), (b, Established)];
        assert!(matches!(decide(&all, c), Admission::Refuse(_)));
        let closing = [(a, Closing), (a, Established), (a, Established), (b, Established)];
        assert_eq!(decide(&closing, c), Admission::Accept, "a closing connection does not count");
        let mut many = vec![(a, Closing); CLOSING_MAX];
        many.extend([(a, Handshake); 4]);
        assert!(matches!(decide(&many, c), Admission::Refuse(_)), "too many threads are about to end");
    }

    #[test]
    fn origin_is_an_address_a_network_of_ipv6_or_a_process() {
        let of = |address: &str| Origin::of(PeerName::Tcp(address.parse().unwrap()));
        assert_eq!(of("10.0.0.1:1"), of("10.0.0.1:2"));
        assert_eq!(
            of("10.0.0.1:1"),
            of("[::ffff:10.0.0.1]:1"),
            "the same address, as seen by a listener for both"
        );
        assert_ne!(of("10.0.0.1:1"), of("10.0.0.2:1"));
        assert_eq!(of("[2001:db8:1:2::1]:1"), of("[2001:db8:1:2:ffff::]:1"));
        assert_ne!(of("[2001:db8:1:2::1]:1"), of("[2001:db8:1:3::1]:1"));
        assert_eq!(Origin::of(PeerName::Local(7)), Origin::of(PeerName::Local(7)));
        assert_ne!(Origin::of(PeerName::Local(7)), Origin::of(PeerName::Local(8)));
    }
}
