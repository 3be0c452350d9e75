//! [`Vendor`]: the vendors whose drivers can be loaded.

use std::fmt;

/// Vendor of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA, through the driver API.
    Cuda,
    /// AMD, through the HIP runtime.
    Hip,
}

impl Vendor {
    /// All vendors.
    pub const ALL: [Vendor; 2] = [Vendor::Cuda, Vendor::Hip];

    /// Returns the environment variable with the path of the library, used if the caller passes none.
    pub fn env(self) -> &'static str {
        self.pick("MOONTIDE_CUDA_LIB", "MOONTIDE_HIP_LIB")
    }

    /// Returns the oldest driver that has every function.
    pub fn min_version(self) -> &'static str {
        self.pick("the driver of CUDA 10.2 (440.33)", "ROCm 6.0")
    }

    /// Returns the names that the loader tries if no path is given.
    pub(super) fn libraries(self) -> &'static [&'static str] {
        match self {
            Vendor::Cuda => &["libcuda.so.1"],
            // Only development packages contain the plain name.
            Vendor::Hip => &["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"],
        }
    }

    pub(super) fn pick<T>(self, cuda: T, hip: T) -> T {
        match self {
            Vendor::Cuda => cuda,
            Vendor::Hip => hip,
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pick("CUDA", "HIP"))
    }
}
