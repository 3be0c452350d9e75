//! [`Place`] and [`Spread`]: where a caller wants the replicas of an object.

use std::fmt;
use std::str::FromStr;

use crate::limits::SEGMENTS_PER_NODE_MAX;
use crate::{NodeId, SegmentId};

/// A node, or one segment of it. A put tries the places that its caller prefers first.
///
/// It is shown and parsed as `NODE` or `NODE/SEGMENT`, e.g. `14c4daf3bcb05a85/0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The node.
    pub node: NodeId,
    /// A segment of its memory; `None`: any.
    pub segment: Option<SegmentId>,
}

impl From<NodeId> for Place {
    fn from(node: NodeId) -> Place {
        Place { node, segment: None }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.segment {
            Some(segment) => write!(f, "{}/{segment}", self.node),
            None => self.node.fmt(f),
        }
    }
}

impl FromStr for Place {
    type Err = InvalidPlace;

    fn from_str(text: &str) -> Result<Place, InvalidPlace> {
        let invalid = || InvalidPlace(text.to_owned());
        let (node, segment) = match text.split_once('/') {
            Some((node, segment)) => (node, Some(segment)),
            None => (text, None),
        };
        let node = node.parse().map_err(|_| invalid())?;
        let Some(segment) = segment else { return Ok(Place::from(node)) };
        // `parse` alone would accept a sign.
        let is_plain = segment.bytes().all(|byte| byte.is_ascii_digit());
        let number = segment.parse().ok().filter(|&number| is_plain && number < SEGMENTS_PER_NODE_MAX);
        Ok(Place { node, segment: Some(SegmentId(number.ok_or_else(invalid)?)) })
    }
}

/// Error: a text is not a place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a place; use NODE or NODE/SEGMENT, with 16 hexadecimal digits and a number below 65,536"
)]
pub struct InvalidPlace(String);

const _: () = assert!(SEGMENTS_PER_NODE_MAX == 65_536, "the text above names it");

/// What the replicas of an object must not share, besides their node. The numbers are those of the attribute in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Spread {
    /// Their host.
    Host = 1,
    /// Their rack.
    Rack = 2,
    /// Their zone.
    Zone = 3,
}

impl Spread {
    /// All values, in ascending order.
    pub const ALL: [Spread; 3] = [Spread::Host, Spread::Rack, Spread::Zone];

    /// Returns the value with this number.
    pub fn from_number(number: u8) -> Option<Spread> {
        Spread::ALL.into_iter().find(|spread| spread.number() == number)
    }

    /// Returns the value with this name.
    pub fn from_name(name: &str) -> Option<Spread> {
        Spread::ALL.into_iter().find(|spread| spread.name() == name)
    }

    /// Returns the number in the attribute of a record.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns the name on the command line, in Python and in labels of nodes.
    pub const fn name(self) -> &'static str {
        match self {
            Spread::Host => "host",
            Spread::Rack => "rack",
            Spread::Zone => "zone",
        }
    }

    /// Returns the domain of a node. An unknown label is equal to nothing: a node without one is in a domain of its own, or
    /// in that of the rack or host that it names.
    pub fn domain<L>(self, node: NodeId, labels: Labels<L>) -> Domain<L> {
        let Labels { host, rack, zone } = labels;
        let host = host.map(Domain::Host);
        let rack = rack.map(Domain::Rack).filter(|_| self >= Spread::Rack);
        let zone = zone.map(Domain::Zone).filter(|_| self >= Spread::Zone);
        zone.or(rack).or(host).unwrap_or(Domain::Node(node))
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Labels of a node, where they are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Labels<L> {
    /// Its host.
    pub host: Option<L>,
    /// Its rack.
    pub rack: Option<L>,
    /// Its zone.
    pub zone: Option<L>,
}

/// Part of a cluster that has at most one replica of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Domain<L> {
    /// A node.
    Node(NodeId),
    /// All nodes with this host.
    Host(L),
    /// All nodes with this rack.
    Rack(L),
    /// All nodes with this zone.
    Zone(L),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_round_trip_and_unknown_labels_are_equal_to_nothing() {
        for number in 0..=u8::MAX {
            let spread = Spread::from_number(number);
            assert_eq!(spread.map(Spread::number), (1..=3).contains(&number).then_some(number));
        }
        for spread in Spread::ALL {
            assert_eq!(Spread::from_name(spread.name()), Some(spread));
            assert_eq!(
                spread.domain::<u8>(NodeId(7), Labels { host: None, rack: None, zone: None }),
                Domain::Node(NodeId(7))
            );
        }
        assert_eq!(Spread::from_name("row"), None);
        let all = Labels { host: Some("h"), rack: Some("r"), zone: Some("z") };
        let domains = Spread::ALL.map(|spread| spread.domain(NodeId(7), all));
        assert_eq!(domains, [Domain::Host("h"), Domain::Rack("r"), Domain::Zone("z")]);
        let some = Labels { zone: None, ..all };
        assert_eq!(Spread::Zone.domain(NodeId(7), some), Domain::Rack("r"));
        assert_eq!(Spread::Zone.domain(NodeId(7), Labels { rack: None, ..some }), Domain::Host("h"));
        assert_eq!(Spread::Host.domain(NodeId(7), Labels { host: None, ..all }), Domain::Node(NodeId(7)));
    }

    #[test]
    fn places_round_trip_through_text_and_others_are_refused() {
        let node = NodeId(0x14c4_daf3_bcb0_5a85);
        for (text, place) in [
            ("14c4daf3bcb05a85", Place::from(node)),
            ("14c4daf3bcb05a85/0", Place { node, segment: Some(SegmentId(0)) }),
            ("14c4daf3bcb05a85/65535", Place { node, segment: Some(SegmentId(65_535)) }),
        ] {
            assert_eq!(text.parse(), Ok(place));
            assert_eq!(place.to_string(), text);
        }
        for segment in ["", "/", "/+1", "/-1", "/x", "/65536", "/1/2", "/4294967296"] {
            let text = format!("14c4daf3bcb05a8{segment}");
            assert_eq!(text.parse::<Place>(), Err(InvalidPlace(text.clone())), "a short node");
            if !segment.is_empty() {
                let text = format!("14c4daf3bcb05a85{segment}");
                assert_eq!(text.parse::<Place>(), Err(InvalidPlace(text.clone())));
            }
        }
    }
}
