//! Names of types, planes and orders in Python, and their numpy and torch types.

use moontide_blocks::{Attention, CacheShape, DimOrder, Dtype, Plane};
use moontide_types::tensor;
use pyo3::prelude::*;

use crate::errors;

/// Shape and element type of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementKind {
    pub(crate) shape: CacheShape,
    /// Element type for libraries that support it; numpy does not support all.
    pub(crate) dtype: tensor::Dtype,
}

impl ElementKind {
    /// Returns the element type for the buffer protocol and numpy: an integer of the same size for unsupported types.
    pub(crate) fn plain_dtype(&self) -> tensor::Dtype {
        match self.shape.dtype {
            Dtype::F32 => tensor::Dtype::Float32,
            Dtype::F16 => tensor::Dtype::Float16,
            Dtype::Bf16 => tensor::Dtype::Uint16,
            Dtype::F8 => tensor::Dtype::Uint8,
        }
    }

    /// Checks a plane and a layer.
    pub(crate) fn plane_and_layer(&self, plane: &str, layer: u32) -> PyResult<(Plane, u32)> {
        let planes = self.shape.planes();
        let found = match plane {
            "k" | "keys" => Plane::Keys,
            "latent" if planes.len() == 1 => Plane::Keys,
            "v" | "values" if planes.len() == 2 => Plane::Values,
            _ if planes.len() == 1 => {
                return Err(errors::argument(format!("plane must be \"latent\" or \"k\", not {plane:?}")));
            }
            _ => return Err(errors::argument(format!("plane must be \"k\" or \"v\", not {plane:?}"))),
        };
        if layer >= self.shape.layers {
            let layers = self.shape.layers;
            return Err(errors::argument(format!(
                "there is no layer {layer}; the cache has {layers} layers"
            )));
        }
        Ok((found, layer))
    }
}

/// Returns the type of a cache for a name, and the tensor type.
pub(crate) fn dtype(name: &str) -> PyResult<(Dtype, tensor::Dtype)> {
    Ok(match name {
        "float32" => (Dtype::F32, tensor::Dtype::Float32),
        "float16" => (Dtype::F16, tensor::Dtype::Float16),
        "bfloat16" => (Dtype::Bf16, tensor::Dtype::Bfloat16),
        "float8" | "float8_e4m3fn" => (Dtype::F8, tensor::Dtype::Float8E4m3fn),
        "float8_e5m2" => (Dtype::F8, tensor::Dtype::Float8E5m2),
        _ => {
            return Err(errors::argument(format!(
                "dtype must be \"float32\", \"float16\", \"bfloat16\", \"float8_e4m3fn\" (or \"float8\") or \
                 \"float8_e5m2\", not {name:?}"
            )));
        }
    })
}

pub(crate) fn layout_order(name: &str) -> PyResult<DimOrder> {
    match name {
        "token" => Ok(DimOrder::TokenMajor),
        "head" => Ok(DimOrder::HeadMajor),
        _ => Err(errors::argument(format!("layout_order must be \"token\" or \"head\", not {name:?}"))),
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
        _ => Err(errors::argument("pass either kv_heads and dim, or latent=(rank, rope)")),
    }
}
