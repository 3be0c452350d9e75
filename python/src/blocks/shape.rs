//! Words for shapes: types, planes, layers, and what numpy and torch call them.

use moontide_blocks::{Attention, Dtype, Order, Plane, Shape};
use moontide_types::tensor;
use pyo3::prelude::*;

use crate::errors;

/// What a cache's numbers are, here and to array libraries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) shape: Shape,
    /// To libraries that have a word for it, which numpy has not for all.
    pub(crate) dtype: tensor::Dtype,
}

impl Kind {
    /// As the buffer protocol and numpy have it: types that they do not know are numbers of the same size.
    pub(crate) fn plain_dtype(&self) -> tensor::Dtype {
        match self.shape.dtype {
            Dtype::F32 => tensor::Dtype::Float32,
            Dtype::F16 => tensor::Dtype::Float16,
            Dtype::Bf16 => tensor::Dtype::Uint16,
            Dtype::F8 => tensor::Dtype::Uint8,
        }
    }

    /// The plane and layer that were asked for, if there are such.
    pub(crate) fn place(&self, plane: &str, layer: u32) -> PyResult<(Plane, u32)> {
        let planes = self.shape.planes();
        let found = match plane {
            "k" | "keys" => Plane::Keys,
            "latent" if planes.len() == 1 => Plane::Keys,
            "v" | "values" if planes.len() == 2 => Plane::Values,
            _ if planes.len() == 1 => {
                return Err(errors::argument(format!("a plane is \"latent\" or \"k\" here, not {plane:?}")));
            }
            _ => return Err(errors::argument(format!("a plane is \"k\" or \"v\", not {plane:?}"))),
        };
        if layer >= self.shape.layers {
            let layers = self.shape.layers;
            return Err(errors::argument(format!("there is no layer {layer}; there are {layers}, from 0")));
        }
        Ok((found, layer))
    }
}

/// The two words for a type.
pub(crate) fn dtype(name: &str) -> PyResult<(Dtype, tensor::Dtype)> {
    Ok(match name {
        "float32" => (Dtype::F32, tensor::Dtype::Float32),
        "float16" => (Dtype::F16, tensor::Dtype::Float16),
        "bfloat16" => (Dtype::Bf16, tensor::Dtype::Bfloat16),
        "float8" | "float8_e4m3fn" => (Dtype::F8, tensor::Dtype::Float8E4m3fn),
        "float8_e5m2" => (Dtype::F8, tensor::Dtype::Float8E5m2),
        _ => {
            return Err(errors::argument(format!(
                "dtype is \"float32\", \"float16\", \"bfloat16\", \"float8_e4m3fn\" (or \"float8\") or \
                 \"float8_e5m2\", not {name:?}"
            )));
        }
    })
}

pub(crate) fn order(name: &str) -> PyResult<Order> {
    match name {
        "token" => Ok(Order::TokenMajor),
        "head" => Ok(Order::HeadMajor),
        _ => Err(errors::argument(format!("order is \"token\" or \"head\", not {name:?}"))),
    }
}

pub(crate) fn attention(
    kv_heads: Option<u32>,
    dim: Option<u32>,
    latent: Option<(u32, u32)>,
) -> PyResult<Attention> {
    match (kv_heads, dim, latent) {
        (Some(kv_heads), Some(dim), None) => Ok(Attention::Heads { kv_heads, dim }),
        (None, None, Some((rank, rope))) if rank.checked_add(rope).is_some() => {
            Ok(Attention::Latent { rank, rope })
        }
        _ => Err(errors::argument("a cache has either kv_heads and dim, or latent=(rank, rope)")),
    }
}
