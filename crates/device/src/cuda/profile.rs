//! The planner's numbers for a GPU: the profile of its kind, with the numbers that the driver reports.

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use deuteron_codegen::cuda::Arch;
use deuteron_plan::{Machine, Quantity};

use super::context::Context;
use super::error::CudaError;

/// The profile with the GPU's name, or that of the nearest generation; numbers reported by the driver take precedence.
pub(crate) fn machine(context: &Context, name: &str, arch: Arch) -> Result<Machine, CudaError> {
    let (profile, exact) = nearest(name, arch);
    let mut machine = Machine::profile(profile).map_err(|error| CudaError::Unsupported {
        what: format!("the profile {profile}"),
        expected: "one that can be read".into(),
        got: error.to_string(),
    })?;
    // What the driver tells, and by how much that is divided. Of the cache half: a tensor shares it with its neighbours.
    let numbers = [
        (Quantity::Processors, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1.0),
        (Quantity::Registers, Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 1.0),
        (Quantity::Threads, Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 1.0),
        (Quantity::SharedKb, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 1024.0),
        (Quantity::BlockSharedKb, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 1024.0),
        (Quantity::CacheMb, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, f64::from(2 << 20)),
    ];
    for (quantity, attribute, unit) in numbers {
        let value = context.attribute(attribute)? as f64 / unit;
        // A profile of this very GPU keeps its own reasons where the numbers agree.
        if exact && machine.find(quantity) == Some(value) {
            continue;
        }
        if let Ok(changed) = machine.clone().with(quantity, value, "asked of the driver") {
            machine = changed;
        }
    }
    if !exact {
        machine.name = format!("{name} (like {profile})");
    }
    Ok(machine)
}

/// The profile, and whether it is of this very GPU.
fn nearest(name: &str, arch: Arch) -> (&'static str, bool) {
    let known = [("H200", "h200"), ("H100", "h100"), ("A100", "a100"), ("RTX 4090", "rtx4090")];
    if let Some((_, profile)) = known.iter().find(|(part, _)| name.contains(part)) {
        return (profile, true);
    }
    let profile = match arch {
        Arch::Sm75 | Arch::Sm80 => "a100",
        Arch::Sm86 | Arch::Sm89 | Arch::Sm120 => "rtx4090",
        Arch::Sm90a | Arch::Sm100 => "h200",
    };
    (profile, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_known_by_its_name_or_its_generation() {
        assert_eq!(nearest("NVIDIA H200", Arch::Sm90a), ("h200", true));
        assert_eq!(nearest("NVIDIA GeForce RTX 4090", Arch::Sm89), ("rtx4090", true));
        assert_eq!(nearest("NVIDIA L4", Arch::Sm89), ("rtx4090", false));
        assert_eq!(nearest("Tesla T4", Arch::Sm75), ("a100", false));
    }
}
