//! [`Outcomes`]: one outcome per entry of a request.

use moontide_types::limits::BATCH_KEYS_MAX;

use super::ConvertError;
use super::check::{self, copied};
use super::response::{Response, ResponseBody, response_of};
use crate::packed::Codes;
use crate::v1;

/// Response with one outcome per entry.
pub type OutcomesResponse<'a> = Response<'a, Outcomes<'a>>;

/// Outcomes of the entries of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcomes<'a> {
    /// One code per entry of the request.
    pub codes: Codes<'a>,
}

impl<'a> ResponseBody<'a> for Outcomes<'a> {
    response_of!(v1::OutcomesResponse);

    fn read(m: &'a v1::OutcomesResponse) -> Result<Self, ConvertError> {
        Ok(Outcomes { codes: check::codes("codes", &m.codes, BATCH_KEYS_MAX)? })
    }

    fn write(&self) -> v1::OutcomesResponse {
        v1::OutcomesResponse { context: None, codes: copied(self.codes.as_encoded()) }
    }
}
