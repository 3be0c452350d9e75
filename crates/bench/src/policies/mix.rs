//! [`Mix`]: traffic that is added to a trace.

use super::{NumberedRequest, NumberedTrace};

/// Traffic that is added to a trace. Half of the requested blocks of the result are of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mix {
    /// Prompts as long as those of the trace, none of them used again
    Scan,
    /// Documents that are read in turn, again and again, together 1.2 times as large as the memory
    Loop,
}

/// Blocks of a document of the loop.
const DOCUMENT: usize = 64;

impl Mix {
    /// Returns its name in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mix::Scan => "scan",
            Mix::Loop => "loop",
        }
    }

    /// Returns the trace with the added requests. Each follows a request of the trace, at the same time.
    pub(crate) fn add_to(self, trace: &NumberedTrace, capacity: usize) -> NumberedTrace {
        let documents = (capacity * 6 / 5).div_ceil(DOCUMENT).max(1);
        let (mut next, mut pending, mut requests) = (trace.distinct, 0, vec![]);
        for request in &trace.requests {
            requests.push(request.clone());
            let mut add = |first: usize, len: usize| {
                let blocks = (first as u32..).take(len).collect();
                requests.push(NumberedRequest { at_us: request.at_us, blocks });
            };
            match self {
                Mix::Scan => {
                    add(next, request.blocks.len());
                    next += request.blocks.len();
                }
                Mix::Loop => {
                    pending += request.blocks.len();
                    while pending >= DOCUMENT {
                        pending -= DOCUMENT;
                        add(trace.distinct + next % documents * DOCUMENT, DOCUMENT);
                        next += 1;
                    }
                }
            }
        }
        let distinct = match self {
            Mix::Scan => next,
            Mix::Loop => trace.distinct + documents * DOCUMENT,
        };
        NumberedTrace { requests, distinct }
    }
}
