// RUN: %opt %s -p outline-dispatch | %filecheck %s

// The function goes into an executable; what is left calls it and ties the buffer that is changed to
// its result, so that the caller's memory is used. The map is only read.

func.func @loop(%start: i64, %stop: i64, %map: memref<?xi32>, %y: memref<?xf64>) {
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %one = arith.constant 1.0 : f64
  %c1 = arith.constant 1 : index
  scf.for %entity = %first to %end step %c1 {
    %target = memref.load %map[%entity] : memref<?xi32>
    %index = arith.index_cast %target : i32 to index
    memref.store %one, %y[%index] : memref<?xf64>
  }
  func.return
}

// CHECK:       hal.executable.source
// CHECK:         hal.executable.export
// CHECK:           func.func @loop() attributes
// CHECK:             %[[MAP:.*]] = "hal.interface.binding.subspan"({{.*}}binding = 0 : index{{.*}} -> memref<?xi32>
// CHECK:             %[[Y:.*]] = "hal.interface.binding.subspan"({{.*}}binding = 1 : index{{.*}} -> memref<?xf64>
// CHECK:             memref.load %[[MAP]]
// CHECK:             memref.store %{{.*}}, %[[Y]]
// CHECK:       func.func @loop(%{{.*}}: i64, %{{.*}}: i64, %[[IN:.*]]: tensor<?xi32>, %[[OUT:.*]]: tensor<?xf64> {iree.abi.output = 0 : index}) -> tensor<?xf64>
// CHECK:         %[[RESULT:.*]] = "flow.dispatch"({{.*}}%[[IN]], %[[OUT]]{{.*}}tied_operands = [5 : index]
// CHECK-NEXT:    func.return %[[RESULT]] : tensor<?xf64>
