// RUN: %opt %s -p 'place-on-gpu{kind="cuda"}' | %filecheck %s
// RUN: %opt %s -p 'place-on-gpu{kind="vulkan"}' | %filecheck %s --check-prefix VULKAN

// Local tensors get the memory of a thread. For Vulkan constants become operands after all others.

"memref.global"() <{sym_name = "table", type = memref<2xf64>, initial_value = dense<[1.0, 2.0]> : tensor<2xf64>, sym_visibility = "private", constant, alignment = 64 : i64}> : () -> ()
func.func @loop(%start: i64, %stop: i64, %y: memref<?xf64>) {
  %table = memref.get_global @table : memref<2xf64>
  %local = memref.alloca() {alignment = 64 : i64} : memref<2x1xf64>
  %c0 = arith.constant 0 : index
  %entry = memref.load %table[%c0] : memref<2xf64>
  memref.store %entry, %local[%c0, %c0] : memref<2x1xf64>
  func.return
}

// CHECK:       memref.global
// CHECK:       func.func @loop(%{{.*}}: i64, %{{.*}}: i64, %{{.*}}: memref<?xf64>) {
// CHECK:         memref.get_global @table
// CHECK:         memref.alloca() : memref<2x1xf64, #gpu.address_space<private>>

// VULKAN-NOT:  memref.global
// VULKAN:      func.func @loop(%{{.*}}: i64, %{{.*}}: i64, %{{.*}}: memref<?xf64>, %[[TABLE:.*]]: memref<2xf64>)
// VULKAN-SAME:   pyop3_mlir.tables = [dense<[1.000000e+00, 2.000000e+00]> : tensor<2xf64>]
// VULKAN:        %[[LOCAL:.*]] = memref.alloca() : memref<2x1xf64, #spirv.storage_class<Function>>
// VULKAN:        memref.load %[[TABLE]][%{{.*}}] : memref<2xf64>
// VULKAN:        memref.store %{{.*}}, %[[LOCAL]]
