//! [`BoundedCodec`]: counts the elements of gRPC messages before decoding, as for the bodies of frames.
//!
//! `build.rs` sets it as the codec of every generated client and server, so no handler can omit it. tonic checks
//! its own limit first (`max_decoding_message_size`, 4 MiB by default); servers set it to
//! [`REQUEST_BYTES_MAX`](moontide_types::limits::REQUEST_BYTES_MAX).

use std::marker::PhantomData;

use moontide_types::ErrorCode;
use prost::Message;
use prost::bytes::Buf;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::convert::{self, Bounded};

/// Codec of all services: prost's encoder, and a decoder that first counts elements.
#[derive(Clone, Copy, Debug)]
pub struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        BoundedCodec(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Bounded + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(PhantomData)
    }
}

/// Decoder of [`BoundedCodec`].
#[derive(Clone, Copy, Debug)]
pub struct BoundedDecoder<U>(PhantomData<U>);

impl<U: Bounded> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The whole message lies in one buffer, so `copy_to_bytes` does not copy.
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        convert::decode(bytes).map(Some).map_err(|error| match error.code() {
            ErrorCode::TooLarge => Status::resource_exhausted(error.to_string()),
            _ => Status::invalid_argument(error.to_string()),
        })
    }
}
